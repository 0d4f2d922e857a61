"""A real Slurm 22.05 on this machine, for the time of a test session: munged, slurmctld and a few slurmd in one folder.

Nodes are called 127.0.0.2, 127.0.0.3 ..., so that their names resolve without an entry in /etc/hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

INSTALL = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
COMMANDS = {
    name: shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") for name in ("munged", "slurmctld", "slurmd", "sbatch")
}
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

# Debian's slurmctld drops Gres= when it is called slurmctld-wlm, so the daemons are started by their plain names.
# cred_expire: a requeued job waits that long, 121 s by default. MinJobAge: finished jobs stay visible. MessageTimeout and
# TCPTimeout: a node that stands still for 10 s would have the job that starts there launched a second time.
_CONF = """ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
SlurmdPort={slurmd_port}
SrunPortRange={srun_ports}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
PlugStackConfig={folder}/plugstack.conf
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_continue
ReturnToService=2
FirstJobId={first_job}
MinJobAge=3600
KillWait={kill_wait}
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=60
MessageTimeout=100
TCPTimeout=30
MailProg=/bin/true
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=10 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=100 PreemptMode=OFF
"""


class Cluster:
    """``nodes`` nodes of ``cpus`` CPUs and ``gpus`` files that Slurm takes for GPUs; more than this machine has, if need be."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 4, gpus: int = 2, kill_wait: int = 30) -> None:
        self.folder = folder.resolve()
        assert len(str(self.folder)) < 64, f"{self.folder}: Slurm's sockets below it may have 107 characters"
        self.nodes = [f"127.0.0.{i + 2}" for i in range(nodes)]
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        (self.folder / "state").mkdir(parents=True)
        self._configure(cpus, gpus, kill_wait)

    def _configure(self, cpus: int, gpus: int, kill_wait: int) -> None:
        host = socket.gethostname().partition(".")[0]
        port = free_ports(500)
        text = _CONF.format(
            host=host, user=getpass.getuser(), port=port, slurmd_port=port + 10, srun_ports=f"{port + 100}-{port + 400}",
            folder=self.folder, first_job=1000 + secrets.randbelow(60000), kill_wait=kill_wait,
        )  # fmt: skip
        devices = []
        for i, node in enumerate(self.nodes):
            (self.folder / f"spool.{node}").mkdir()
            text += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + 11 + i} CPUs={cpus} Boards=1 "
                f"SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN\n"
            )
            for gpu in range(gpus):
                (self.folder / f"gpu{i * gpus + gpu}").touch()
            devices.append(f"NodeName={node} Name=gpu File={self.folder}/gpu[{i * gpus}-{(i + 1) * gpus - 1}]\n")
        # A partition may name its nodes only after they are defined.
        partitions = [line for line in text.splitlines() if line.startswith("PartitionName")]
        rest = [line for line in text.splitlines() if not line.startswith("PartitionName")]
        (self.folder / "slurm.conf").write_text("\n".join(rest + partitions) + "\n")
        (self.folder / "gres.conf").write_text("".join(devices))
        (self.folder / "cgroup.conf").touch()
        (self.folder / "plugstack.conf").touch()

    # --- daemons ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The daemons end with this process. What jobs have started would not: that is what the reaper is for."""
        self.reaper = subprocess.Popen(
            [sys.executable, __file__, self.environment["SLURM_CONF"]], stdin=subprocess.PIPE, start_new_session=True
        )
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self.folder.chmod(0o755)  # munged refuses a socket that others cannot reach
        files = [
            f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "log-file", "pid-file", "seed-file")
        ]
        socket_file = self.folder / "munge.sock"
        self._run("munged", "--foreground", "--force", f"--socket={socket_file}", "--num-threads=2", *files)
        wait_for(socket_file.exists, "munged")
        self._run("slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)
        wait_for(lambda: self.try_command("sinfo", "-h", "-o", "%T %D") == f"idle {len(self.nodes)}", "the nodes")

    def start_node(self, node: str) -> None:
        self._run("slurmd", "-D", "-N", node, key=node)

    def lose_node(self, node: str) -> None:
        """Everything there is gone at once: the daemon, its steps, their tasks. Then it is found to be down."""
        self.daemons[node].kill()
        # A cluster of another test session has nodes of the same names.
        mine = {b"SLURMD_NODENAME": node.encode(), b"SLURM_CONF": self.environment["SLURM_CONF"].encode()}
        tasks = [pid for pid, environ in processes() if mine.items() <= environ.items()]
        for pid in [*{parent for pid in tasks if (parent := parent_of(pid)) and is_step(parent)}, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons[node].wait()
        self.command("scontrol", "update", f"nodename={node}", "state=DOWN", "reason=test")

    def return_node(self, node: str) -> None:
        if self.daemons[node].poll() is not None:
            self.start_node(node)
        self.try_command("scontrol", "update", f"nodename={node}", "state=RESUME")  # where slurmd has not brought it back itself

    def _run(self, name: str, *arguments: str, key: str = "") -> None:
        def die_with_parent() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        with (self.folder / f"{name}.out").open("ab") as output:
            self.daemons[key or name] = subprocess.Popen(
                [COMMANDS[name], *arguments], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip

    def stop(self) -> None:
        """Ends all jobs, then the daemons."""
        try:
            self.try_command("scancel", "--full", "-s", "KILL", "-u", getpass.getuser())
            self.try_command("scancel", "-u", getpass.getuser())
            wait_for(lambda: not self.try_command("squeue", "-h"), "the end of all jobs")
        finally:
            for daemon in reversed(self.daemons.values()):
                daemon.terminate()
            for daemon in self.daemons.values():
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
            self.reaper.stdin.close()
            self.reaper.wait()

    # --- commands -----------------------------------------------------------------------------------------------

    def command(self, *words: str, cwd: Path | None = None, **environment: str) -> str:
        """What a Slurm command prints; AssertionError with its message when it fails."""
        done = self.run(*words, cwd=cwd, **environment)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}{done.stdout}"
        return done.stdout.strip()

    def try_command(self, *words: str) -> str:
        return self.run(*words).stdout.strip()

    def run(self, *words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        env = self.environment | environment
        return subprocess.run(words, env=env, cwd=cwd or self.folder, capture_output=True, text=True, timeout=60)

    def submit(self, *words: str, cwd: Path, **environment: str) -> int:
        return int(self.command("sbatch", "--parsable", *words, cwd=cwd, **environment))

    def state(self, job: int) -> str:
        return self.try_command("squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T")

    def field(self, job: int, name: str) -> str:
        """A field of ``scontrol show job``; the first word of its value."""
        found = re.search(rf"\b{name}=(\S*)", self.command("scontrol", "show", "job", str(job)))
        assert found, name
        return found[1]

    def wait(self, job: int, *states: str, seconds: float = 120.0) -> str:
        """Waits until the job is in one of ``states`` (by default: has ended, and its processes are gone)."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")
        wait_for(lambda: self.state(job) in (states or ended), f"job {job} (now {self.state(job)})", seconds)
        return self.state(job)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Patient: a loaded machine may stand still for half a minute."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.1)


def processes() -> Iterator[tuple[int, dict[bytes, bytes]]]:
    """All processes of this machine that may be looked at, with their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            yield int(folder.name), dict(word.partition(b"=")[::2] for word in words)


def parent_of(pid: int) -> int:
    """0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def is_step(pid: int) -> bool:
    return b"slurmstepd" in Path(f"/proc/{pid}/cmdline").read_bytes()


def lives(pid: int) -> bool:
    """As children.is_running; this file also runs by itself, without that one in reach."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def end_processes(conf: str) -> None:
    """Of the cluster with this slurm.conf, whose path they all have in their environment."""
    while found := [pid for pid, environ in processes() if environ.get(b"SLURM_CONF") == conf.encode() and lives(pid)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def free_ports(count: int) -> int:
    """The first of ``count`` ports below the ephemeral range, none of which is listened on at its start."""
    first = 10000 + os.getpid() % 19 * count
    for turn in range(19):
        port = 10000 + (first - 10000 + turn * count) % (19 * count)
        if all(can_listen(port + offset) for offset in (0, 10, 11, 12, 13)):
            return port
    raise AssertionError("no free ports for a Slurm cluster")


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.stdin.read()  # until the tests stop the cluster, or are killed
    end_processes(sys.argv[1])
