"""Make this process look like Windows or macOS to our packages, as far as Linux can.

A copy of this file named ``sitecustomize.py`` in a folder of ``PYTHONPATH`` does so in all
processes that inherit ``ACCEL_OTHER_SYSTEM=win32`` or ``darwin``. Our packages and the script that
runs get an ``os``, ``signal``, ``sys``, ``socket`` and ``mmap`` without what the other system
lacks; torch and the standard library do not notice. New processes are spawned, and torch for
Windows has no libuv.

What it cannot show: real paths, file locks, consoles, and what torch does there.
"""

from __future__ import annotations

import builtins
import importlib
import multiprocessing
import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

VARIABLE = "ACCEL_OTHER_SYSTEM"
#: What `os` and its like have on Linux and not there.
MISSING: Mapping[str, Mapping[str, frozenset[str]]] = {
    "win32": {
        "os": frozenset(
            {
                *("O_CLOEXEC", "O_DIRECT", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC"),
                *("WEXITSTATUS", "WIFEXITED", "WIFSIGNALED", "WNOHANG", "WTERMSIG", "chown"),
                *("confstr", "copy_file_range", "eventfd", "fchdir", "fchmod", "fchown"),
                *("fdatasync", "fork", "forkpty", "fstatvfs", "getegid", "geteuid", "getgid"),
                *("getgroups", "getloadavg", "getpgid", "getpgrp", "getpriority", "getresuid"),
                *("getsid", "getuid", "getxattr", "killpg", "lchown", "lockf", "memfd_create"),
                *("mkfifo", "mknod", "nice", "openpty", "pidfd_open", "pipe2", "posix_fadvise"),
                *("posix_fallocate", "pread", "preadv", "pwrite", "pwritev", "readv"),
                *("register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_yield"),
                *("sendfile", "setpgid", "setpriority", "setsid", "setxattr", "splice", "statvfs"),
                *("sync", "sysconf", "tcgetpgrp", "ttyname", "uname", "wait", "wait3", "wait4"),
                "writev",
            }
        ),
        "signal": frozenset(
            {
                *("ITIMER_REAL", "SIGALRM", "SIGBUS", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGIO"),
                *("SIGKILL", "SIGPIPE", "SIGPOLL", "SIGPROF", "SIGPWR", "SIGQUIT", "SIGRTMAX"),
                *("SIGRTMIN", "SIGSTOP", "SIGSYS", "SIGTRAP", "SIGTSTP", "SIGTTIN", "SIGTTOU"),
                *("SIGURG", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGWINCH", "SIGXCPU", "SIGXFSZ"),
                *("alarm", "getitimer", "pause", "pidfd_send_signal", "pthread_kill"),
                *("pthread_sigmask", "setitimer", "siginterrupt", "sigpending", "sigtimedwait"),
                *("sigwait", "sigwaitinfo"),
            }
        ),
        "mmap": frozenset(
            {
                *("MADV_DONTFORK", "MADV_DONTNEED", "MADV_HUGEPAGE", "MADV_SEQUENTIAL"),
                *("MADV_WILLNEED", "MAP_ANON", "MAP_ANONYMOUS", "MAP_POPULATE", "MAP_PRIVATE"),
                *("MAP_SHARED", "PROT_READ", "PROT_WRITE"),
            }
        ),
        "select": frozenset(
            {
                *("EPOLLIN", "POLLIN", "POLLOUT", "epoll", "poll"),
            }
        ),
        "socket": frozenset({"AF_UNIX", "socketpair", "send_fds", "recv_fds"}),
        "time": frozenset({"tzset", "clock_gettime", "pthread_getcpuclockid"}),
    },
    "darwin": {
        "os": frozenset(
            {
                *("O_DIRECT", "O_NOATIME", "O_PATH", "O_TMPFILE", "copy_file_range", "eventfd"),
                *("fdatasync", "getresuid", "getxattr", "memfd_create", "pidfd_open", "pipe2"),
                *("posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_setaffinity"),
                *("setxattr", "splice"),
            }
        ),
        "signal": frozenset(
            {
                *("SIGPOLL", "SIGPWR", "SIGRTMAX", "SIGRTMIN", "SIGSTKFLT", "pidfd_send_signal"),
                *("sigtimedwait", "sigwaitinfo"),
            }
        ),
        "mmap": frozenset(
            {
                *("MADV_DONTFORK", "MADV_HUGEPAGE", "MAP_POPULATE"),
            }
        ),
        "select": frozenset(
            {
                *("EPOLLIN", "epoll"),
            }
        ),
    },
}
#: Modules that are not there.
MISSING_MODULES: Mapping[str, frozenset[str]] = {
    "win32": frozenset(
        {
            *("curses", "fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog"),
            *("termios", "tty"),
        }
    ),
    "darwin": frozenset(),
}
_PACKAGES = {"accel_callbacks", "checkpoint_io", "loggers", "__main__", "__mp_main__"}


class _Narrowed(types.ModuleType):
    """A module without some of its names, and with others in their place."""

    def __init__(
        self, module: Any, missing: frozenset[str] = frozenset(), replaced: Any = None
    ) -> None:
        # A name alone makes an empty module, as in ``type(sys)("name")``.
        super().__init__(module if isinstance(module, str) else module.__name__)
        self.__dict__.update(_module=module, _missing=missing, _replaced=replaced or {})

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} there")
        return self._replaced[name] if name in self._replaced else getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self._module, str):
            super().__setattr__(name, value)
        else:
            setattr(self._module, name, value)


def pretend(system: str) -> None:
    """Give our packages the modules of another system, from now on."""
    replaced: dict[str, dict[str, Any]] = {"sys": {"platform": system}}
    if system == "win32":
        replaced["os"] = {"name": "nt", "open": _open, "execvpe": _execvpe}
        replaced["socket"] = {"SO_EXCLUSIVEADDRUSE": importlib.import_module("socket").SO_REUSEADDR}
    names = {*MISSING[system], *replaced}
    modules = {
        name: _Narrowed(
            importlib.import_module(name),
            MISSING[system].get(name, frozenset()),
            replaced.get(name, {}),
        )
        for name in names
    }
    imported = builtins.__import__

    def importing(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        asking = str((globals or {}).get("__name__", "")).partition(".")[0]
        if level == 0 and asking in _PACKAGES:
            if name.partition(".")[0] in MISSING_MODULES[system]:
                raise ModuleNotFoundError(f"No module named {name!r} there", name=name)
            if name in modules:
                return modules[name]
        found = imported(name, globals, locals, fromlist or (), level)
        if system == "win32" and name.startswith("torch.distributed"):
            _without_libuv()
        return found

    builtins.__import__ = importing
    multiprocessing.set_start_method("spawn")


def _open(path: Any, flags: int, mode: int = 0o777) -> int:
    """Open a file; Windows opens no folders."""
    if os.path.isdir(path):
        raise PermissionError(13, "folders cannot be opened there", path)
    return os.open(path, flags, mode)


def _execvpe(file: str, words: Sequence[str], env: Mapping[str, str]) -> None:
    """Start another process and end this one, which has no part in how that goes on."""
    subprocess.Popen([file, *words[1:]], env=env)
    os._exit(0)


_USERS = (
    "torch.distributed",
    "torch.distributed.rendezvous",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)


def _without_libuv() -> None:
    """Have torch's stores fail where they ask for libuv, as torch's build for Windows does."""
    for name in _USERS:
        module = sys.modules.get(name)
        store = vars(module).get("TCPStore") if module is not None else None
        if isinstance(store, type) and not hasattr(store, "of_another_system"):
            vars(module)["TCPStore"] = _store_without_libuv(store)


def _store_without_libuv(store: Any) -> Any:
    class TCPStore(store):  # type: ignore[misc]
        of_another_system = True

        def __init__(self, *args: Any, **options: Any) -> None:
            if options.get("use_libuv", True) or options.get("master_listen_fd") is not None:
                raise RuntimeError("use_libuv was requested but torch was built without it")
            super().__init__(*args, **options)

    return TCPStore


if __name__ == "sitecustomize" and os.environ.get(VARIABLE):
    pretend(os.environ[VARIABLE])
