"""What each rank did and when: recorded as spans, read from files, and explained in words.

spans     a span, and the trace of a run; Chrome trace JSON
recorder  how a rank records its spans, by the host's clock or by CUDA events
chrome    traces read from files: ours, and those of PyTorch's profiler
limits    what each rank did at each moment, and what limited a run, in words
"""

from labkit.tracing.recorder import (
    ClockTimer as ClockTimer,
    CudaTimer as CudaTimer,
    Recorder as Recorder,
)
from labkit.tracing.spans import (
    LOCAL_KINDS as LOCAL_KINDS,
    Meeting as Meeting,
    Span as Span,
    Trace as Trace,
)
