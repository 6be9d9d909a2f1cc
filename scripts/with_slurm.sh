#!/usr/bin/env bash
# Runs a command beside a Slurm of one node on this host: scripts/with_slurm.sh COMMAND [ARGUMENT..]. Its exit code is the command's.
#
# The daemons, the command and the jobs have namespaces of their own for processes and for the network, and what the daemons write is
# in a temporary folder. So nothing of the host is changed, no port is used, and all processes end with this script, however it ends.
# Needs root and (Debian) apt-get install --no-install-recommends slurmctld slurmd slurm-client munge. Tried with Slurm 22.05.
# Ends with 77 if there is something missing, or a Slurm that is somebody's.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
  [ $# -gt 0 ] || { echo "usage: $0 COMMAND [ARGUMENT..]" >&2; exit 2; }
  cannot() { echo "$0: $*" >&2; exit 77; }
  [ "$(id -u)" = 0 ] || cannot "needs root"
  for program in munged slurmctld slurmd sbatch srun unshare; do
    [ -n "$(PATH=$PATH:/usr/sbin:/sbin command -v $program)" ] || cannot "there is no $program"
  done
  [ -z "${SLURM_CONF:-}" ] || cannot "SLURM_CONF is set: this host is part of a cluster"
  for file in /etc/slurm/slurm.conf /etc/slurm-llnl/slurm.conf; do
    [ ! -e $file ] || cannot "$file is there: this host is part of a cluster"
  done
  unshare --pid --net --mount --uts --fork true 2>/dev/null || cannot "namespaces cannot be made here"
  folder=$(mktemp -d)
  trap 'rm -rf "$folder" || { sleep 1 && rm -rf "$folder"; }' EXIT
  code=0
  unshare --pid --net --mount --uts --fork --kill-child --mount-proc "$0" --inside "$folder" "$@" || code=$?
  exit $code
fi

folder=$2
shift 2
PATH=$PATH:/usr/sbin:/sbin
host=node address=192.0.2.1 # an address beside the loopback's, without which getaddrinfo finds none
hostname $host
printf '127.0.0.1 localhost\n%s %s\n' $address $host >"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
ip link set lo up
ip address add $address/32 dev lo
mkdir "$folder"/{state,spool}
chmod 755 "$folder"
dd if=/dev/urandom of="$folder/munge.key" bs=128 count=1 status=none
chmod 600 "$folder/munge.key"
cat >"$folder/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=$host($address)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=$address CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$folder/slurm.conf
munged --foreground --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
  --seed-file="$folder/munged.seed" --log-file="$folder/munged.log" 2>"$folder/munged.err" &
slurmctld -D -c >"$folder/slurmctld.log" 2>&1 &
slurmd -D >"$folder/slurmd.log" 2>&1 &
for _ in $(seq 100); do
  if sinfo --noheader --format=%T 2>/dev/null | grep -q idle; then
    code=0
    "$@" || code=$?
    exit $code
  fi
  sleep 0.2
done
echo "$0: Slurm does not start" >&2
tail -n 20 "$folder"/*.log "$folder/munged.err" >&2
exit 77
