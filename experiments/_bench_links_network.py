"""Machines with slow links, emulated on this one: a network namespace each, joined by a switch, links limited in rate.

    machine 0 [up]---[m0] switch [m1]---[up] machine 1
                          [m2]---[up] machine 2 ...

The switch has a namespace too, so that nothing of the host's network changes. Links are limited by `tc tbf`. Queues
hold all that senders have under way, and TCP is plain Reno: nothing is dropped, so time is bytes over rate.

A rate is that of each direction. Two processes that exchange data by gloo take turns, whichever asked first, since its
request to send travels behind the other's data. Over links with a limit for each direction an exchange therefore takes
up to twice as long as its bytes do, and a ring, whose peers differ, does not. So by default both directions of a
machine's link have one budget, of twice the rate: taking turns costs nothing, and whoever sends and receives alike has
what two directions would give. For that what comes and what goes passes through one more device (ifb) of the machine.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments._program import UserError

PREFIX = "jaxdit-links"
SWITCH = f"{PREFIX}-switch"
UPLINK = "up"
_BRIDGE, _SHARED = "bridge0", "both"
# Known inside the namespaces only.
_SUBNET = "10.213.77"
# A burst of two segments of TCP, and a queue for 16 windows.
_BURST, _LIMIT, _PACKETS = "128kb", "64mb", "100000"
# Of TCP: Reno's window grows until all is under way, and stays while a program computes.
_TCP = "cd /proc/sys/net/ipv4 && echo reno > tcp_congestion_control && echo 0 > tcp_slow_start_after_idle"
_TOOLS = ("ip", "tc")
# `ip netns exec` puts a namespace's own files in the place of those in /etc.
_ETC = Path("/etc/netns")

Command = list[str]


def machine_name(machine: int) -> str:
    """The namespace of a machine."""
    return f"{PREFIX}-{machine}"


def machine_address(machine: int) -> str:
    """The address of a machine."""
    return f"{_SUBNET}.{machine + 1}"


def hosts_text(machine: int, host: str) -> str:
    """A hosts file by which this computer's name means the machine's address, which gloo tells the others."""
    return f"127.0.0.1 localhost\n{machine_address(machine)} {host}\n"


def inside(name: str, command: Sequence[str]) -> Command:
    """A command, run in a namespace."""
    return ["ip", "netns", "exec", name, *command]


def build_commands(num_machines: int, *, shared: bool) -> list[Command]:
    """Commands that make the switch, the machines and their links, without limits.

    Args:
        num_machines: how many.
        shared: whether both directions of a link shall have one limit.
    """
    commands = [
        ["ip", "netns", "add", SWITCH],
        ["ip", "-n", SWITCH, "link", "add", "name", _BRIDGE, "type", "bridge"],
        ["ip", "-n", SWITCH, "link", "set", "dev", _BRIDGE, "up"],
    ]
    for machine in range(num_machines):
        name, port = machine_name(machine), f"m{machine}"
        link = ["ip", "link", "add", "name", port, "netns", SWITCH, "type", "veth"]
        commands += [
            ["ip", "netns", "add", name],
            [*link, "peer", "name", UPLINK, "netns", name],
            ["ip", "-n", SWITCH, "link", "set", "dev", port, "master", _BRIDGE, "up"],
            ["ip", "-n", name, "addr", "add", f"{machine_address(machine)}/24", "dev", UPLINK],
            ["ip", "-n", name, "link", "set", "dev", UPLINK, "up"],
            ["ip", "-n", name, "link", "set", "dev", "lo", "up"],
            inside(name, ["sh", "-c", _TCP]),
            *(_share_commands(name) if shared else []),
        ]
    return commands


def _share_commands(name: str) -> list[Command]:
    """All packets of the uplink, both ways, pass through one device."""
    redirect = ["protocol", "all", "u32", "match", "u32", "0", "0"]
    redirect += ["action", "mirred", "egress", "redirect", "dev", _SHARED]
    return [
        ["ip", "-n", name, "link", "add", "name", _SHARED, "type", "ifb"],
        ["ip", "-n", name, "link", "set", "dev", _SHARED, "up"],
        ["tc", "-n", name, "qdisc", "add", "dev", UPLINK, "clsact"],
        *(
            ["tc", "-n", name, "filter", "add", "dev", UPLINK, way, *redirect]
            for way in ("egress", "ingress")
        ),
    ]


def limit_commands(num_machines: int, rate_mbit: float | None, *, shared: bool) -> list[Command]:
    """Commands that limit each link, either way to the rate or both together to twice as much; None lifts limits."""
    queue = ["pfifo", "limit", _PACKETS]
    if rate_mbit is not None:
        rate = f"{2 * rate_mbit if shared else rate_mbit:g}mbit"
        queue = ["tbf", "rate", rate, "burst", _BURST, "limit", _LIMIT]
    ends = []
    for machine in range(num_machines):
        name = machine_name(machine)
        ends += [(name, _SHARED)] if shared else [(name, UPLINK), (SWITCH, f"m{machine}")]
    return [["tc", "-n", name, "qdisc", "replace", "dev", device, "root", *queue] for name, device in ends]


def check_privileges() -> None:
    """Whether namespaces can be made here.

    Raises:
        UserError: naming what is missing.
    """
    missing = [] if os.geteuid() == 0 else ["root"]
    missing += [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise UserError(
            "bench_links emulates machines by network namespaces, which need root and iproute2 (ip, tc); missing here:"
            f" {', '.join(missing)}. Run it as root, where Debian's iproute2 is installed."
        )


class Network:
    """The emulated machines, while the context is entered. One at a time on a computer.

    On leaving, and also when this process is killed, everything is removed, and whatever still runs in the namespaces
    is killed, by a process apart. What survives even so, because that one was killed too, is removed on entering.

    Args:
        num_machines: how many.
        shared: whether both directions of a link have one limit.

    Raises:
        UserError: on entering, if another one exists, or the system refuses.
    """

    def __init__(self, num_machines: int, *, shared: bool) -> None:
        self.num_machines, self.shared = num_machines, shared
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Network":
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(_only_one())
            remove_network()
            stack.enter_context(_removed_afterwards(lock))
            self._write_hosts()
            for command in build_commands(self.num_machines, shared=self.shared):
                run(command)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def limit(self, rate_mbit: float | None) -> None:
        """Limit all links; None lifts the limits."""
        for command in limit_commands(self.num_machines, rate_mbit, shared=self.shared):
            run(command)

    def _write_hosts(self) -> None:
        for machine in range(self.num_machines):
            folder = _ETC / machine_name(machine)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(hosts_text(machine, socket.gethostname()))


def run(command: Command) -> str:
    """Output of a command.

    Raises:
        UserError: with what it says, if it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"bench_links: `{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}. It needs the"
            " capabilities NET_ADMIN and SYS_ADMIN, which root in a container may lack, and of the kernel veth, bridge,"
            " tbf, and ifb, u32 and mirred (not those with --separate)."
        )
    return done.stdout


def remove_network() -> None:
    """Remove all that bears our names; nothing is no error."""
    for name in existing():
        for pid in run(["ip", "netns", "pids", name]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run(["ip", "netns", "delete", name])
    for folder in _ETC.glob(f"{PREFIX}-*"):
        shutil.rmtree(folder)


def existing() -> list[str]:
    """Namespaces that bear our names."""
    # A line is a name, and an id where there is one.
    lines = run(["ip", "netns", "list"]).splitlines()
    return [line.split()[0] for line in lines if line.startswith(f"{PREFIX}-")]


@contextlib.contextmanager
def _only_one() -> Iterator[int]:
    """Holds a lock that ends with all processes that have its file open. Yields the file's descriptor.

    Raises:
        UserError: another process holds it.
    """
    with open(Path(tempfile.gettempdir()) / f"{PREFIX}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError("bench_links: another run emulates machines here. Wait until it ends.") from error
        yield file.fileno()


@contextlib.contextmanager
def _removed_afterwards(lock: int) -> Iterator[None]:
    """Starts a process that removes the network when its stdin ends: on leaving, or with this process.

    It keeps the lock until it is done, and has a session of its own, so that no signal to this one's reaches it.

    Raises:
        RuntimeError: on leaving, if it failed; it says why on stderr.
    """
    janitor = subprocess.Popen(
        [sys.executable, "-m", "experiments._bench_links_network"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(lock,),
    )
    try:
        yield
    finally:
        assert janitor.stdin is not None
        janitor.stdin.close()
        if janitor.wait():
            raise RuntimeError(f"bench_links: removing the emulated machines failed: {janitor.returncode}")


def main() -> None:
    """Wait for the end of stdin, then remove the network."""
    sys.stdin.read()
    remove_network()


if __name__ == "__main__":
    main()
