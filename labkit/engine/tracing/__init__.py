"""The work of each rank over time: recorded as spans, read from files, and explained in words.

spans     a span, and the trace of a run; Chrome trace JSON
recorder  how a rank records its spans, by the host's clock or by CUDA events
limits    the state of each rank at each moment, and the limit of a run, in words
explain   the limit of a run from its files, in words
load      the contents of files, of which nothing is run
chrome    traces read from files: ours, and those of PyTorch's profiler
profiler  profiles of PyTorch's profiler, one per rank, as spans
flight_recorder, torchtitan   dumps of PyTorch's flight recorder; torchtitan's structured logs
"""

from labkit.engine.tracing.recorder import (
    ClockTimer as ClockTimer,
    CudaTimer as CudaTimer,
    Recorder as Recorder,
)
from labkit.engine.tracing.spans import (
    LOCAL_KINDS as LOCAL_KINDS,
    Meeting as Meeting,
    Span as Span,
    Trace as Trace,
)
