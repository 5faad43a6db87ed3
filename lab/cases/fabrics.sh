# A volume on a namespace that another machine could have lent: NVMe over TCP, both ends in one
# kernel. The connection is lost for a moment, then for longer than ctrl_loss_tmo, under writers.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086,SC2046

TARGET=/sys/kernel/config/nvmet

machine() {
    disk ssd 512M
    controller
    namespace 1 ssd
    bar 16M
}

guest() {
    check "a target, which lends the SSD" target
    check "connecting" connected
    check "formatting" mkfs.gpunvme --quiet $(lent)
    check "mounting" mounted $(lent) /mnt
    check "copying files in" tree_copied /mnt
    head -c 8000007 /dev/urandom >/tmp/random
    cp /tmp/random /mnt/random
    sync /mnt/random
    check "the mount says its device" says "\"device\": \"$(lent)\"" gpunvme --json info /mnt
    check "the direct path reads what was written" intact
    check "peer to peer is refused" refused 1 "vfio" gpunvme read /mnt/random --to pci:$GPU/2 --require p2p
    check "which the doctor says too" refused 4 "not on PCI" gpunvme doctor $(lent) --peer $GPU

    check "writers that sync" writing a b
    check "the connection is lost" lost
    sleep 1
    check "and is there again" lend
    check "the writers go on without an error" go_on
    check "they end" ended
    check "what they synced is there" synced
    check "unmounting" unmounted /mnt
    check "fsck" fsck.gpunvme -n $(lent)
    check "mounting again" mounted $(lent) /mnt
    check "it is the same" intact
    check "so is what was synced" synced

    check "writers of other files" writing c d
    check "the connection is lost once more" lost
    check "for good: the device goes" eventually 20 has_none
    check "the writers end with an error" failed
    check "a direct read is an error" refused 1 "" timeout 20 gpunvme read /mnt/random
    check "so is a read past the caches" refused 1 "input/output error" timeout 20 dd if=/mnt/random of=/tmp/read bs=1M iflag=direct
    check "and a write that is to be durable" refused 1 "" timeout 20 dd if=/tmp/random of=/mnt/late bs=1M conv=fsync
    check "the mount says that it is read-only" says '"read_only": true' gpunvme --json info /mnt
    check "the log says why" grep -i "nvme.*input/output error" /lab/log
    umount /mnt
    check "the daemon ends" eventually 30 gone "$(daemon /mnt)"

    check "the target is there again" lend
    check "connecting again" connected
    check "mounting recovers" mounted $(lent) /mnt
    check "what the writers synced is there" synced
    check "and what was there before" intact
    check "unmounting again" unmounted /mnt
    check "fsck after that" fsck.gpunvme -n $(lent)
}

# A target lends the SSD, which the kernel's driver has, on a port of this machine.
target() {
    while read -r module; do insmod "/modules/$module.ko"; done </modules/fabrics
    mount -t configfs none /sys/kernel/config
    ip link set lo up
    mkdir $TARGET/subsystems/lab $TARGET/subsystems/lab/namespaces/1 $TARGET/ports/1
    echo 1 >$TARGET/subsystems/lab/attr_allow_any_host
    printf %s "$(node)" >$TARGET/subsystems/lab/namespaces/1/device_path
    echo 1 >$TARGET/subsystems/lab/namespaces/1/enable
    echo tcp >$TARGET/ports/1/addr_trtype
    echo ipv4 >$TARGET/ports/1/addr_adrfam
    echo 127.0.0.1 >$TARGET/ports/1/addr_traddr
    echo 4420 >$TARGET/ports/1/addr_trsvcid
    lend
}
lend() { ln -s $TARGET/subsystems/lab $TARGET/ports/1/subsystems/lab; }

# What `nvme connect` does.
connected() {
    echo transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn=lab,reconnect_delay=1,ctrl_loss_tmo=4 >/dev/nvme-fabrics
    eventually 20 has_lent
}
lent() { find /dev -name 'nvme*n1' ! -path "$(node)"; }
has_lent() { [ -b "$(lent)" ]; }
has_none() { [ -z "$(lent)" ]; }

lost() {
    rm $TARGET/ports/1/subsystems/lab
    eventually 10 grep -q connecting /sys/class/nvme/*/state
}

intact() {
    tree_intact /mnt
    gpunvme read /mnt/random --output /tmp/read
    cmp /tmp/random /tmp/read
}

# writing NAME NAME: two write files, and note those that are durable.
writing() {
    mkdir -p /mnt/written
    rm -f /tmp/stop /tmp/failed /tmp/ended
    writer "$1" &
    writer "$2" &
    go_on
}
writer() {
    local number=0
    until [ -e /tmp/stop ]; do
        number=$((number + 1))
        if piece $number | dd of="/mnt/written/$1$number" bs=64k conv=fsync 2>"/tmp/said.$1"; then
            echo "$1 $number" >>/tmp/synced
        else
            cat "/tmp/said.$1" >>/tmp/failed
            break
        fi
    done
    echo "$1" >>/tmp/ended
}
piece() { dd if=/tmp/random bs=4096 skip=$(($1 % 1000)) count=8 2>/dev/null; }
have_synced() { [ "$(wc -l </tmp/synced)" -ge "$1" ]; }

go_on() {
    touch /tmp/synced
    eventually 20 have_synced $(($(wc -l </tmp/synced) + 10))
    [ ! -e /tmp/failed ]
}
ended() {
    touch /tmp/stop
    eventually 20 have_ended
}
have_ended() { [ "$(wc -l </tmp/ended)" = 2 ]; }
failed() {
    eventually 20 have_ended
    cat /tmp/failed
    [ "$(grep -ci 'input/output error\|read-only file system' /tmp/failed)" = 2 ]
}
synced() {
    while read -r writer number; do piece "$number" | cmp - "/mnt/written/$writer$number"; done </tmp/synced
}

verify() { check "fsck of the disk, outside" "$bin/fsck.gpunvme" -n "$run/ssd.img"; }
