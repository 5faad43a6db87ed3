# What the medium refuses arrives as EIO, with the name of the NVMe status in the log, and costs
# nothing but itself.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086

machine() {
    disk ssd 128M
    controller
    namespace 1 ssd
    add -object throttle-group,id=slow,x-iops-total=50
}

guest() {
    check "binding" vfio bind $SSD
    check "formatting" mkfs.gpunvme --quiet vfio:$SSD
    check "mounting" mounted vfio:$SSD /mnt
    head -c 4194304 /dev/urandom >/tmp/victim
    cp /tmp/victim /mnt/victim
    sync /mnt/victim
    # The sector of its second MiB.
    gpunvme map /mnt/victim | awk '$1 == "0" { print $5 + 2048 }' >/lab/sector

    ask read-error
    check "the bad block" refused 1 "input/output error" gpunvme read /mnt/victim --offset 1M --length 4096
    check "by read(2)" refused 1 "input/output error" dd if=/mnt/victim of=/tmp/read bs=4096 skip=256 count=1 iflag=direct
    check "the status by its name" grep "Unrecovered Read Error" /lab/log
    check "what is before it" gpunvme read /mnt/victim --length 1M
    check "what is behind it" gpunvme read /mnt/victim --offset 1028K
    ask heal
    check "all of it, when it is well again" cmp /tmp/victim /mnt/victim

    ask write-error
    check "a write to the bad block" refused 1 "input/output error" gpunvme write /mnt/victim --offset 1M --length 4096 --input /tmp/victim
    check "its status by its name" grep "Write Fault" /lab/log
    ask heal
    check "the same write, when it is well again" gpunvme write /mnt/victim --offset 1M --length 4096 --input /tmp/victim
    sync /mnt/victim

    ask slow
    check "a slow device is only slow" slow
    ask heal
    check "and no reason for a reset" not grep -i "resetting" /lab/log

    ask flush-error
    check "a flush that fails" flush_fails
    umount /mnt
    check "the daemon ends" eventually 60 gone "$(daemon /mnt)"
    ask heal
    check "fsck" fsck.gpunvme -n vfio:$SSD
    check "mounting again" mounted vfio:$SSD /mnt
    check "what had been written" eventually 1 cmp -s /tmp/expected /mnt/victim
    check "unmounting" unmounted /mnt
}

not() { if "$@"; then return 1; fi; }

slow() {
    cp -r /lab/scripts /mnt/slow
    find /mnt/slow -type f -exec sync {} +
    diff -r /lab/scripts /mnt/slow
}

flush_fails() {
    head -c 1048576 /tmp/victim >/tmp/expected
    head -c 4096 /tmp/victim >>/tmp/expected
    tail -c +1052673 /tmp/victim >>/tmp/expected
    # The flush of a commit in the background may be the one that fails: then the volume is
    # read-only before dd has written.
    refused 1 'input/output error\|read-only file system' dd if=/tmp/victim of=/mnt/second bs=64k conv=fsync
}

host() {
    answer read-error inject read 5
    answer heal well
    answer write-error inject write 28
    answer heal well
    answer slow put_below ssd '"driver": "throttle", "throttle-group": "slow", "file": "ssd-file"'
    answer heal well
    answer flush-error put_below ssd '"driver": "blkdebug", "image": "ssd-file", "inject-error": [{"event": "none", "iotype": "flush", "errno": 5, "once": true}]'
    answer heal well
}

inject() {
    put_below ssd "\"driver\": \"blkdebug\", \"image\": \"ssd-file\",
        \"inject-error\": [{\"event\": \"none\", \"iotype\": \"$1\", \"errno\": $2, \"sector\": $(cat "$run/share/sector"), \"immediately\": true}]"
}

well() { put_on ssd ssd-file; }

verify() { check "fsck of the disk, outside" "$bin/fsck.gpunvme" -n "$run/ssd.img"; }
