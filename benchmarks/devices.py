"""Time and memory of a device, for benchmarks that run on one."""

import gc
import platform
import time

import torch


class Device:
    """Time and memory of a device; of the CPU only time."""

    def __init__(self, name):
        self.name, self.cuda = name, name == "cuda"

    def describe(self):
        if not self.cuda:
            return platform.processor() or platform.machine()
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} ({major}.{minor}), CUDA {torch.version.cuda}"

    def moment(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start, end):
        return start.elapsed_time(end) if self.cuda else 1000 * (end - start)

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def allocated(self):
        return torch.cuda.memory_allocated() if self.cuda else 0

    def free(self):
        torch.compiler.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def peak(self, run):
        """Returns the most memory that was allocated meanwhile."""
        if not self.cuda:
            run()
            return 0
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()
