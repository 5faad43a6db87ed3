# Other controllers and other settings: small and unlimited transfers, 512-byte and 4 KiB blocks,
# several namespaces, few queues; PRPs and SGLs; interrupts and polling. Each is formatted, filled,
# read into the BAR and compared.
# shellcheck shell=dash disable=SC2034,SC2154,SC2086

machine() {
    local number
    for number in 1 2 3 4 5 6; do disk ssd$number 128M; done
    head -c 9000001 /dev/urandom >"$run/share/in"
    # 0000:01:00.0: transfers of 8 KiB at most.
    controller ,mdts=1
    namespace 1 ssd1
    bar 128M
    # 0000:03:00.0: transfers of any size, blocks of 4 KiB.
    another 3 ,mdts=0
    add -device nvme-ns,drive=ssd2,bus=nvme3,nsid=1,logical_block_size=4096,physical_block_size=4096
    # 0000:04:00.0: two namespaces, of different blocks.
    another 4
    add -device nvme-ns,drive=ssd3,bus=nvme4,nsid=1 -device nvme-ns,drive=ssd4,bus=nvme4,nsid=7,logical_block_size=4096,physical_block_size=4096
    # 0000:05:00.0: one I/O queue, and two interrupts.
    another 5 ,max_ioqpairs=1,msix_qsize=2
    add -device nvme-ns,drive=ssd5,bus=nvme5,nsid=1
    # 0000:06:00.0: a controller memory buffer, which the driver does not use.
    another 6 ,cmb_size_mb=16,mdts=4
    add -device nvme-ns,drive=ssd6,bus=nvme6,nsid=1
}

# another NUMBER [,OPTIONS]: a controller behind a port of its own.
another() {
    add -device pcie-root-port,id=port$1,chassis=$1,slot=$1 -device "nvme,id=nvme$1,serial=lab$1,bus=port$1${2-}"
}

guest() {
    check "binding" vfio bind 0000:01:00.0 0000:03:00.0 0000:04:00.0 0000:05:00.0 0000:06:00.0
    exercise 0 vfio:0000:01:00.0
    exercise 1 vfio:0000:01:00.0,sgl=off,completion=interrupt
    exercise 2 vfio:0000:03:00.0,sgl=off,completion=poll
    exercise 3 vfio:0000:04:00.0,ns=7
    exercise 4 vfio:0000:05:00.0,queues=1,depth=1
    exercise 5 vfio:0000:06:00.0,sgl=off
    check "a namespace that is not there" refused 1 "namespace 3" mkfs.gpunvme vfio:0000:04:00.0,ns=3
}

# exercise NUMBER DEVICE: the whole way; the file lies in the BAR at so many times 16 MiB then.
exercise() {
    check "$2: formatting" mkfs.gpunvme --quiet --force $2
    check "$2: mounting" mounted $2 /mnt
    check "$2: copying in" cp /lab/in /bin/busybox /mnt
    check "$2: fsync" find /mnt/in -type f -exec sync {} +
    check "$2: READ" gpunvme read /mnt/in --to pci:$GPU/2:$(($1 * 16))M --require p2p
    check "$2: READ at odd places" gpunvme read /mnt/in --offset 4711 --length 1000001 --to pci:$GPU/2:$(($1 * 16 + 12))M
    check "$2: WRITE" gpunvme write /mnt/out --from pci:$GPU/2:$(($1 * 16))M --length 9000001 --require p2p
    check "$2: what was written" cmp /lab/in /mnt/out
    check "$2: interrupts as it should" interrupts $2
    check "$2: unmounting" unmounted /mnt
    check "$2: fsck" fsck.gpunvme -n $2
}

interrupts() {
    case $1 in
        *completion=poll*) [ "$(count_interrupts $1)" = 0 ] ;;
        *completion=interrupt*) [ "$(count_interrupts $1)" -gt 10 ] ;;
    esac
}
# Of a device's I/O queues: its vectors but the first.
count_interrupts() {
    local address=${1#vfio:}
    awk -v name="(${address%%,*})" 'index($0, name) && !/\[0\]/ { sum += $2 + $3 } END { print sum + 0 }' /proc/interrupts
}

verify() {
    local number
    for number in 0 1 2 3 4 5; do
        check "BAR at $((number * 16)) MiB" cmp --ignore-initial=$((number * 16777216)):0 --bytes=9000001 "$run/bar" "$run/share/in"
        check "BAR at $((number * 16 + 12)) MiB" cmp --ignore-initial=$((number * 16777216 + 12582912)):4711 --bytes=1000001 "$run/bar" "$run/share/in"
    done
    for number in 1 2 4 5 6; do check "fsck of disk $number, outside" "$bin/fsck.gpunvme" -n "$run/ssd$number.img"; done
}
