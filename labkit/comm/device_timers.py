"""The clocks of the devices that one rank uses."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from labkit.tracing import ClockTimer, CudaTimer, JointTimer, Span, Timer


class DeviceTimers:
    """A clock for each device: a GPU's events, or the host's clock."""

    def __init__(self) -> None:
        self._host = ClockTimer()
        self._of_gpu: dict[torch.device, CudaTimer] = {}

    def of(self, device: torch.device) -> Timer:
        """The clock of the work on ``device``."""
        return self._gpu(device) if device.type == "cuda" else self._host

    def of_all(self, devices: Iterable[torch.device]) -> Timer:
        """The clock of work that passes through ``devices``.

        On the CPU nothing is queued: where a GPU is among the devices, its events tell when the
        CPU's work before them has ended, too.
        """
        used = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        timers = [self._gpu(device) for device in used]
        return JointTimer(timers) if len(timers) > 1 else timers[0] if timers else self._host

    def _gpu(self, device: torch.device) -> CudaTimer:
        if device not in self._of_gpu:
            self._of_gpu[device] = CudaTimer(device)
            # Now, and not in the first step, for which the host would have to wait.
            self._of_gpu[device].calibrate()
        return self._of_gpu[device]


def without_drift(spans: list[Span], timer: Timer) -> list[Span]:
    """``spans`` on the host's clock; waits for the GPU of ``timer`` to tell how much it drifts."""
    rate = timer.rate() if isinstance(timer, CudaTimer | JointTimer) else 1.0
    if rate == 1.0:
        return spans
    return [replace(s, start_s=s.start_s * rate, end_s=s.end_s * rate) for s in spans]
