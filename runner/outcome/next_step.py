"""Advice on a failure, derived from its kind and its text."""

from __future__ import annotations

import re

from spark_hvd.runner.outcome.rows import Failed, FailureKind

_MEMORY_ON_SPARK = (
    "The usual reason is a lack of memory. Ranks use spark.executor.memoryOverhead, not Java's heap: raise it, use a "
    "smaller batch, or put fewer ranks on a host. The executor's log, or dmesg on the host, has details."
)
_MEMORY_HERE = (
    "The usual reason is a lack of memory: use a smaller batch, or fewer ranks. dmesg on this machine has details."
)
_SEGFAULT = (
    "Native code crashed at the innermost line of the stack. Most often two packages (torch, CUDA, numpy, pyarrow) are "
    "incompatible: compare their versions with those that work elsewhere; `spark-hvd doctor` shows them."
)
_BUS = "Most often shared memory is full, which a DataLoader's workers use: enlarge /dev/shm, or use fewer workers."
_ILLEGAL = "A package was built for another processor than this host's."
MODULE_ON_SPARK = (
    'Send your own modules along: spark-submit --py-files, or spark.addArtifact("x.py", pyfile=True). Install packages '
    "for the executors' Python (PYSPARK_PYTHON)."
)
_MODULE_HERE = "Install it for this Python. If the module is yours, add its folder to PYTHONPATH."
_CUDA_MEMORY = (
    "Use a smaller batch on each rank; DistributedOptimizer(backward_passes_per_step=n) keeps the effective one. "
    "nvidia-smi shows other processes on that GPU."
)
_FILES = (
    "Raise the limit of open files where executors start (ulimit -n), use fewer workers, or call "
    'torch.multiprocessing.set_sharing_strategy("file_system").'
)
_ASSERT = 'Run once with env={"CUDA_LAUNCH_BLOCKING": "1"}: the traceback then ends at the line at fault.'
_NO_CUDA = (
    "This rank has no GPU, or its torch is built without CUDA. For GPUs: run(..., gpus_per_proc=1). On CPUs, leave "
    '.cuda() out, or choose: device = "cuda" if torch.cuda.is_available() else "cpu".'
)
_ORDINAL = (
    "If Spark hands out GPUs, a rank sees only its own, numbered from 0, and the first is already its current device. "
    'Leave torch.cuda.set_device(hvd.local_rank()) out and use device "cuda", or take '
    "hvd.local_rank() % torch.cuda.device_count()."
)
_SAME_GPU = (
    "NCCL refuses two ranks on one GPU, and the tensors of two ranks are on the same GPU. When your function starts, "
    'the current device is the rank\'s own GPU: use "cuda" rather than "cuda:0".'
)
_PATH = "Every rank opens paths on its own host: use a path that all hosts can read, or a URL of a store."
_TWICE = "The ranks are already connected, and the default process group exists: leave init_process_group out."
_LIGHTNING = (
    "Lightning counts the ranks of a host as its devices: Trainer(devices=hvd.local_size(), "
    "num_nodes=hvd.cross_size()). If each rank sees only its own GPU, or hosts have different numbers of ranks: "
    'os.environ["LOCAL_RANK"] = "0" before Trainer(devices=1, num_nodes=hvd.size()).'
)
_ECHO = (
    "No rank failed on its own: the network between ranks failed, or a rank left early. Every rank must call the same "
    "collectives the same number of times."
)
_EXIT = "Something ended the process: look for os._exit or exit(), and see the last output."

_BY_SIGNAL = {"SIGSEGV": _SEGFAULT, "SIGBUS": _BUS, "SIGILL": _ILLEGAL}
_BY_TEXT: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"CUDA out of memory|OutOfMemoryError"), _CUDA_MEMORY),
    (re.compile(r"not compiled with CUDA|no attribute '_cuda_|No CUDA GPUs|Found no NVIDIA driver"), _NO_CUDA),
    (re.compile(r"initialize the default process group twice"), _TWICE),
    (re.compile(r"device-side assert"), _ASSERT),
    (re.compile(r"invalid device ordinal|[Ii]nvalid device id"), _ORDINAL),
    (re.compile(r"insufficient shared memory|killed by signal: Bus error"), _BUS),
    (re.compile(r"Too many open files"), _FILES),
    (re.compile(r"You set `devices=.* in Lightning|MisconfigurationException: You requested gpu"), _LIGHTNING),
]


def next_step(failure: Failed, *, on_spark: bool) -> str:
    """Say what the user should do about a failure.

    Returns:
        One or two sentences; empty if the error itself says it, or if nothing helpful is known.
    """
    match failure.kind:
        case FailureKind.SIGNAL:
            if "SIGKILL" in failure.error:
                return _MEMORY_ON_SPARK if on_spark else _MEMORY_HERE
            return next((text for name, text in _BY_SIGNAL.items() if name in failure.error), "")
        case FailureKind.EXIT if failure.exitcode is not None and not failure.traceback:
            return _EXIT
        case FailureKind.EXCEPTION if "Duplicate GPU detected" in failure.error:
            return _SAME_GPU
        case FailureKind.EXCEPTION if failure.echo:
            return _ECHO
        case FailureKind.EXCEPTION if "self.parallel_devices[self.local_rank]" in failure.traceback:
            return _LIGHTNING
        case FailureKind.EXCEPTION:
            return _by_text(failure.error, on_spark=on_spark and failure.executor != "driver")
    return ""


def _by_text(error: str, *, on_spark: bool) -> str:
    if error.startswith("ModuleNotFoundError"):
        return MODULE_ON_SPARK if on_spark else _MODULE_HERE
    if on_spark and error.startswith("FileNotFoundError"):
        return _PATH
    return next((text for pattern, text in _BY_TEXT if pattern.search(error)), "")
