#!/usr/bin/env bash
# PyTorch 2.15.0: a record_function that another thread ends is marked asynchronous in the profile,
# but its end is not recorded: it lasts to the end of the profile, or to that of the span around it.
#
# torch.profiler knows spans that begin in one thread and end in another (is_async). Yet a thread of
# Python's threading is not profiled, and record_function.__exit__ in it does nothing that the
# profile shows, without a word. So a span around work that a pool or a queue's thread completes
# has a duration that says nothing of the work, and a trace full of such spans looks as if all of
# them overlap with everything after them.
# The underscored _call_end_callbacks_on_future (used for RPC) takes the state of the profiler
# along: with a future that the other thread completes, the end is right.
#
# Seen (ms, rounded to 100; the work takes 200, the span around it 100, the profile 600):
#   ended by its own thread 200, asynchronous: False
#   ended by another thread 600, asynchronous: True
#   the same, inside a span 100, asynchronous: True
#   ended by a future of another thread 200, asynchronous: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import threading
import time

import torch
from torch.futures import Future
from torch.profiler import ProfilerActivity, profile, record_function


def begin():
    """Begin a span; return the function that ends it."""
    span = record_function("work")
    span.__enter__()
    return lambda: span.__exit__(None, None, None)


def begin_with_future():
    span = record_function("work")
    span.__enter__()
    future = Future()
    span._call_end_callbacks_on_future(future)
    return lambda: future.set_result(None)


def by_itself(end):
    end()


def by_another(end):
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()


def measured(begin_span, end_span, inside=False):
    """Tenths of a second that the profile gives a span of 0.2 s, and whether it is asynchronous."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        around = record_function("around")
        if inside:
            around.__enter__()
        end = begin_span()
        time.sleep(0.1)
        if inside:
            around.__exit__(None, None, None)
        time.sleep(0.1)
        end_span(end)
        time.sleep(0.4)
        torch.ones(3)
    (event,) = [event for event in recorded.events() if event.name == "work"]
    return round(event.time_range.elapsed_us() / 1e5), event.is_async


measured(begin, by_itself)  # the profiler starts
for name, expected, case in (
    ("ended by its own thread", (2, False), (begin, by_itself)),
    ("ended by another thread", (6, True), (begin, by_another)),
    ("the same, inside a span", (1, True), (begin, by_another, True)),
    ("ended by a future of another thread", (2, True), (begin_with_future, by_another)),
):
    tenths, is_async = measured(*case)
    print(f"{name} {100 * tenths}, asynchronous: {is_async}", flush=True)
    if (tenths, is_async) != expected:
        raise SystemExit(f"{name}: was {expected}")
PYTHON
"$folder/env/bin/python" "$folder/case.py" 2> "$folder/errors" || {
    tail -20 "$folder/errors"
    exit 1
}
