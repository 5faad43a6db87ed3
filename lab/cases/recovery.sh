# Commands that are lost, a controller that another program stops, one that reports a fatal status,
# and one that does not come back: callers see success or EIO, and never wait for ever.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086

machine() {
    disk ssd 128M
    controller
    add -object throttle-group,id=hold -blockdev driver=throttle,node-name=held,throttle-group=hold,file=ssd
    namespace 1 held
    # The guest pokes at registers that vfio-pci has.
    boot=iomem=relaxed
}

guest() {
    check "binding" vfio bind $SSD
    check "formatting" mkfs.gpunvme --quiet vfio:$SSD
    check "mounting" mounted vfio:$SSD,timeout=1 /mnt
    head -c 2000000 /dev/urandom >/tmp/file
    cp /tmp/file /mnt/file
    sync /mnt/file
    registers=$(awk 'NR == 1 { print $1 }' /sys/bus/pci/devices/$SSD/resource)

    ask hold
    check "a read whose commands are lost, and come through after a reset" lost_and_found
    check "what was read then" cmp /tmp/file /tmp/read
    check "the log says so" in_log "resetting the controller" "the controller is back"

    check "another program stops the controller" devmem $((registers + 0x14)) 32 0
    check "reading all the same" reads
    check "the log says that too" in_log "resetting the controller" "the controller is back"

    check "another program makes the controller fail" fatal
    check "reading after that" reads
    check "the log says CFS" in_log "CSTS.CFS" "the controller is back"

    # QEMU answers reads of registers that are not there with zeroes, not with ones.
    check "the controller's registers vanish" memory_space 0
    check "reading is an error" refused 1 "input/output error\|no such device" timeout 20 gpunvme read /mnt/file
    check "the log says what to do" in_log "resetting the controller" "reset it with"
    umount /mnt
    check "the daemon ends" eventually 60 gone "$(daemon /mnt)"
    check "the controller is there again" memory_space 6
    check "fsck after that" fsck.gpunvme -n vfio:$SSD
    check "mounting after that" mounted vfio:$SSD /mnt
    check "the file is still whole" cmp /tmp/file /mnt/file
    check "unmounting" unmounted /mnt
}

lost_and_found() {
    timeout 30 gpunvme read /mnt/file --output /tmp/read &
    local reader=$!
    eventually 25 grep -q "resetting the controller" /lab/log
    ask release
    wait $reader
}

reads() { timeout 30 gpunvme read /mnt/file --output /tmp/read && cmp /tmp/file /tmp/read; }

# An enabled controller with a page size that it does not have.
fatal() {
    devmem $((registers + 0x14)) 32 0
    devmem $((registers + 0x14)) 32 0x00460781
    [ $(($(devmem $((registers + 0x1c)) 32) & 2)) = 2 ]
}

# The command register: 0 makes the device's registers read as ones.
memory_space() {
    # shellcheck disable=SC2059 # it is the format that makes the byte
    printf "\\0$1" | dd of=/sys/bus/pci/devices/$SSD/config bs=1 seek=4 conv=notrunc
}

# in_log WORDS...: the log has them, and is read from here on next time.
in_log() {
    local words
    cp /lab/log /tmp/log
    for words; do tail -c "+$(cat /tmp/read-to 2>/dev/null || echo 1)" /tmp/log | grep -e "$words"; done
    echo $(($(stat -c %s /tmp/log) + 1)) >/tmp/read-to
}

host() {
    answer hold limit 100 1
    answer release limit 0 0
}

# With a size of one byte a request costs so much that the next one waits for most of a minute.
limit() {
    qmp "{\"execute\": \"qom-set\", \"arguments\": {\"path\": \"/objects/hold\", \"property\": \"limits\",
        \"value\": {\"iops-total\": $1, \"iops-size\": $2}}}"
}

verify() { check "fsck of the disk, outside" "$bin/fsck.gpunvme" -n "$run/ssd.img"; }
