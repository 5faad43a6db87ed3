# What the cases share in the guest. Run by its init; it runs the case.
# shellcheck shell=dash disable=SC2034,SC1091

results=/lab/results output=/tmp/output
SSD=0000:01:00.0    # the NVMe controller
GPU=0000:02:00.0    # the device whose BAR stands in for a GPU's memory
EXIT_MOUNT=32

. /lab/scripts/check.sh

# mounted DEVICE DIR [OPTIONS]: mounts, with the daemon's log in /lab/log.
mounted() {
    mkdir -p "$2"
    mount.gpunvme "$1" "$2" -o "foreground,log=info${3:+,$3}" 2>>/lab/log &
    echo $! >"/tmp/daemon$(echo "$2" | tr / .)"
    eventually 60 is_mounted_or_gone "$2"
    is_mounted "$2"
}
is_mounted() { grep -Eq " $1 fuse(blk)?.gpunvme " /proc/mounts; }
is_mounted_or_gone() { is_mounted "$1" || gone "$(daemon "$1")"; }

# The daemon behind a mount.
daemon() { cat "/tmp/daemon$(echo "$1" | tr / .)"; }
gone() { ! grep -q '^State:[[:space:]]*[^Z[:space:]]' "/proc/$1/status" 2>/dev/null; }

# unmounted DIR: unmounts, and is done when the daemon has closed the device.
unmounted() {
    umount "$1"
    eventually 60 gone "$(daemon "$1")"
}

# A tree of files of all sizes that is on every guest.
sources="/programs /lib /bin/busybox /lab/scripts"

# tree_copied DIR, tree_intact DIR: copies that tree, and compares the copy with it.
tree_copied() {
    local source
    for source in $sources; do
        mkdir -p "$1$(dirname "$source")"
        cp -r "$source" "$1$source"
    done
    sync
}
tree_intact() {
    local source
    for source in $sources; do diff -r "$source" "$1$source"; done
}

# ask NAME: has the host do something, and waits until it is done.
ask() {
    # Named when it is there: the host may take it away at once, which creating a file by 9p does
    # not survive.
    echo asked >/lab/asking
    mv /lab/asking "/lab/asked-$1"
    eventually 60 test -e "/lab/done-$1"
    rm "/lab/done-$1"
}

# The first namespace of the SSD, as long as the kernel drives it.
# shellcheck disable=SC2012 # no names with blanks here
node() { ls -d /sys/bus/pci/devices/$SSD/nvme/nvme*/nvme*n1 2>/dev/null | sed 's|.*/|/dev/|'; }
has_node() { [ -b "$(node)" ]; }

. /lab/scripts/case.sh
# The kernel's driver looks for namespaces in the background.
eventually 60 has_node
guest
echo "complete" >>"$results"
