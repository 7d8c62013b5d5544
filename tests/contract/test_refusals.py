"""Permanent failures of the environment: runs return, or raise a named error in time, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import wait_until

# By day: named_lifecycle (no shared memory), private_sockets and scratch (folders), lookups (names).
pytestmark = pytest.mark.slow

SECONDS = 60.0
REFUSING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* A file with the name of what is refused, in the folder REFUSED, says that it is. */
static int refused(const char *what) {
    char path[512];
    const char *folder = getenv("REFUSED");
    if (!folder) return 0;
    snprintf(path, sizeof path, "%s/%s", folder, what);
    int before = errno, is = access(path, F_OK) == 0;
    errno = before;
    return is;
}
#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int flock(int fd, int how) {
    REAL(flock);
    if (refused("flock")) { errno = ENOLCK; return -1; }
    return real(fd, how);
}
int memfd_create(const char *name, unsigned int flags) {
    REAL(memfd_create);
    if (refused("memfd")) { errno = ENOSYS; return -1; }
    return real(name, flags);
}
static int small(off_t size) { return size > (1 << 20) && refused("memory"); }
int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    if (small(size)) { errno = ENOSPC; return -1; }
    return real(fd, size);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int posix_fallocate(int fd, off_t at, off_t size) {
    REAL(posix_fallocate);
    return small(size) ? ENOSPC : real(fd, at, size);
}
int posix_fallocate64(int fd, off_t at, off_t size) { return posix_fallocate(fd, at, size); }
void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    REAL(mmap);
    if ((flags & MAP_SHARED) && fd >= 0 && refused("mmap")) { errno = ENOMEM; return MAP_FAILED; }
    return real(at, size, protection, flags, fd, offset);
}
void *mmap64(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    return mmap(at, size, protection, flags, fd, offset);
}
int socket(int domain, int kind, int protocol) {
    REAL(socket);
    if (domain == AF_INET6 && refused("ipv6")) { errno = EAFNOSUPPORT; return -1; }
    return real(domain, kind, protocol);
}
static int hours(void) { return refused("clock ahead") ? 1 : refused("clock back") ? -1 : 0; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += 3600 * hours();
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    REAL(gettimeofday);
    int result = real(now, zone);
    if (result == 0) now->tv_sec += 3600 * hours();
    return result;
}
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    REAL(getaddrinfo);
    int named = name && strspn(name, "0123456789.:") != strlen(name);
    if (named && refused("dns")) return EAI_AGAIN;
    if (named && strcmp(name, "localhost") && refused("name is loopback")) name = "127.0.1.1";
    return real(name, service, hints, found);
}
static int denied(const char *path, int flags) {
    if (!strncmp(path, "/proc/", 6)) return refused("proc") ? ENOENT : 0;
    if (!(flags & O_CREAT) || !strncmp(path, "/dev/", 5)) return 0;
    return refused("space") ? ENOSPC : refused("writing") ? EROFS : refused("access") ? EACCES : 0;
}
#define OPEN(name, before, head, call) \
    int name(before const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        int error = denied(path, flags); \
        if (error) { errno = error; return -1; } \
        return call; \
    }
#define AT int at,
OPEN(open, , , real(path, flags, mode))
OPEN(open64, , , real(path, flags, mode))
OPEN(openat, AT, , real(at, path, flags, mode))
OPEN(openat64, AT, , real(at, path, flags, mode))
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    int error = denied(path, O_CREAT);
    if (error) { errno = error; return -1; }
    return real(path, mode);
}
static int foreign(int result, struct stat *found) {
    if (result == 0 && refused("owner")) found->st_uid = 4711;
    return result;
}
int fstat(int fd, struct stat *found) { REAL(fstat); return foreign(real(fd, found), found); }
int fstat64(int fd, struct stat64 *found) { REAL(fstat64); return foreign(real(fd, found), (struct stat *)found); }
"""
RUNS = """
import json, os, resource, sys
import spark_hvd

def fn():
    import torch
    import spark_hvd.torch as hvd
    from spark_hvd.scratch import Scratch
    small = hvd.allreduce(torch.ones(100), op=hvd.Sum, name="small")
    for jump in ("clock ahead", "clock back") if hvd.rank() == 0 else ():
        place = os.path.join(os.environ["REFUSED"], jump)
        if os.path.exists(place + " soon"):
            os.rename(place + " soon", place)
    large = hvd.allreduce(torch.ones(2_000_000), op=hvd.Sum, name="large")
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    with Scratch("refusals") as folder:
        open(os.path.join(folder, "file"), "w").close()
    return hvd.allgather_object((hvd.rank(), float(small.sum()), float(large.mean())))

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for line in sys.stdin:
    told = {"value": None, "error": None}
    few = len(os.listdir("/proc/self/fd")) + int(line) if line.strip() else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        told["value"] = spark_hvd.run_local(fn, num_proc=2, verbose=0, timeout=200)  # of a hang: it tells the stacks
    except Exception as error:
        told["error"] = [type(error).__module__, type(error).__name__, str(error)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(json.dumps(told), flush=True)
"""


class Program:
    """A user's program, whose environment refuses what it is told to refuse."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.refused = folder, folder / "refused"
        self.refused.mkdir()
        (folder / "refusing.c").write_text(REFUSING)
        self._library = folder / "refusing.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", self._library, folder / "refusing.c", "-ldl"], check=True)
        self.start()

    def start(self) -> None:
        """Start it, and have it do a run, which starts its fork server."""
        self.temporary = Path(tempfile.mkdtemp(dir=self._folder))
        environment = {
            **os.environ,
            "LD_PRELOAD": str(self._library),
            "REFUSED": str(self.refused),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.run()["value"] == VALUE

    def run(self, descriptors: str = "") -> dict[str, Any]:
        """Start a run whose driver may open this many files, and wait for its report."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{descriptors}\n")
            self.process.stdin.flush()
            told: dict[str, Any] = json.loads(self.process.stdout.readline())
        except BaseException:  # such as pytest's timeout: a hanging run must not delay the next test
            self.process.kill()
            self.process.wait()
            raise
        return told

    def below(self) -> list[psutil.Process]:
        """Return the processes that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """One program for all tests: what is refused to one run must not harm the next."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    made = Program(tmp_path_factory.mktemp("refusals"))
    yield made
    if made.process.poll() == -signal.SIGKILL:  # the previous test failed
        return
    assert made.process.stdin is not None
    made.process.stdin.close()
    assert made.process.wait(SECONDS) == 0
    assert not list(made.temporary.glob("spark_hvd*")), "folders are left behind"


@pytest.fixture
def program(started: Program) -> Program:
    if started.process.poll() is not None:
        started.start()
    return started


GATHERED = [[rank, 200.0, 2.0] for rank in range(2)]
VALUE = [GATHERED] * 2


def kill_fork_server(program: Program) -> None:
    servers = [each for each in program.below() if "spark_hvd.runner.supervise.forkserver" in each.cmdline()]
    assert servers
    for each in servers:
        each.kill()
        wait_until(lambda each=each: each.status() == psutil.STATUS_ZOMBIE)
        # Its main thread becomes a zombie before the others have ended, with their open files.
        wait_until(lambda each=each: len(os.listdir(f"/proc/{each.pid}/task")) == 1)


JUMPS = ["clock ahead", "clock back"]
"""By an hour, in the middle of the run."""
SURVIVED = ["flock", "owner", "memfd", "memory", "mmap", "name is loopback", *JUMPS]
SURVIVED += ["40 descriptors", "ipv6", "dns", "fork server"]
FEW = {"8 descriptors": "8", "20 descriptors": "20", "40 descriptors": "40"}
NAMED = {"proc": "/proc/net/dev", "space": "No usable temporary directory", "8 descriptors": "more open files"}
"""What the error says; the next run is a sound one."""
NAMED |= {"20 descriptors": NAMED["8 descriptors"], "writing": NAMED["space"], "access": NAMED["space"]}


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "spark_hvd" in name}  # other tests, MPI's above all, have files


@pytest.mark.parametrize(
    ("what", "says"),
    [*((what, None) for what in SURVIVED), *NAMED.items()],
)
def test_a_result_or_a_named_error_and_nothing_left(program: Program, what: str, says: str | None) -> None:
    before = shared_memory()
    children = len(program.below())
    if what == "fork server":
        kill_fork_server(program)
    else:
        (program.refused / (f"{what} soon" if what in JUMPS else what)).touch()
    try:
        told = program.run(FEW.get(what, ""))
        assert what not in JUMPS or (program.refused / what).exists()
    finally:
        for each in program.refused.iterdir():
            each.unlink()
    if says is not None:
        module, _, text = told["error"]
        assert module == "builtins" or module.startswith("spark_hvd"), told
        assert says in text
        told = program.run()
    assert told["value"] == VALUE, told
    wait_until(lambda: len(program.below()) <= children)  # a fork server that has died may be replaced
    wait_until(lambda: shared_memory() <= before)
