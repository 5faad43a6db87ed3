# What the scripts share. To be sourced from a script in this folder.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

say() { printf '%s\n' "== $*" >&2; }
die() { printf '%s\n' "${0##*/}: $*" >&2; exit 1; }

# What makes a command run as root, for what needs it: mounting, loop devices, packages. Empty for
# root, who may have no sudo.
sudo=()
if [ "$(id -u)" != 0 ]; then
    sudo=(sudo "--preserve-env=GPUNVME_BIN,TMPDIR,CARGO_TARGET_DIR,CARGO_INCREMENTAL,CARGO_HOME,RUSTUP_HOME" env "PATH=$PATH")
fi
as_root() { "${sudo[@]}" "$@"; }

# Stops unless this machine can mount at all.
need_mounts() {
    if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then die "mounting needs root: run this as root, or install sudo"; fi
    [ -c /dev/fuse ] || as_root modprobe fuse 2>/dev/null || true
    [ -c /dev/fuse ] || die "this machine has no /dev/fuse: load the kernel's fuse module, or give the container the device"
}

# apt-get, one at a time: scripts run beside each other.
apt_get() { as_root env DEBIAN_FRONTEND=noninteractive flock /var/lib/dpkg apt-get -qq "$@"; }

# Installs those Debian packages that are missing.
need_packages() {
    local package missing round
    # apt-get may remove one that was there, of another version than what it installs; that one
    # comes back in the second round.
    for round in 1 2; do
        missing=()
        for package; do
            [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
        done
        [ ${#missing[@]} -gt 0 ] || return 0
        say "installing ${missing[*]}"
        { apt_get update && apt_get -y --no-install-recommends install "${missing[@]}" >/dev/null 2>&1; } ||
            die "cannot install ${missing[*]} (round $round): see what apt-get says about them"
    done
}

# Stops unless there is a Rust toolchain.
need_rust() {
    # Once, however deeply scripts call each other: crates are built again where PATH has changed.
    command -v cargo >/dev/null || [ -n "${CARGO_HOME-}" ] || PATH=$PATH:$HOME/.cargo/bin
    command -v cargo >/dev/null || die "cargo is missing: install Rust from https://rustup.rs"
    command -v cc >/dev/null || need_packages gcc libc6-dev
}

# The environment under $target in which the Python package is built and tested, as $environment.
# Made once; what is in it is as python/tests/requirements.txt says.
python_environment() {
    target=${CARGO_TARGET_DIR:-$PWD/target}
    environment=$target/python
    if ! cmp --quiet python/tests/requirements.txt "$environment/requirements.txt"; then
        python3 -c 'import venv, ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || need_packages python3 python3-venv
        say "installing what the Python package is built and tested with"
        python3 -m venv --clear "$environment"
        "$environment/bin/pip" install --quiet --disable-pip-version-check --requirement python/tests/requirements.txt >&2
        cp python/tests/requirements.txt "$environment"
    fi
}

# A program of a crate that is no dependency, at a fixed version, built once and kept as
# $tools/NAME-VERSION. Little optimized: it waits for what it tests.
tool() {
    local name=$1 version=$2
    [ ! -x "${tools:?}/$name-$version" ] || return 0
    say "building $name $version"
    CARGO_PROFILE_RELEASE_OPT_LEVEL=1 cargo install --quiet --locked --root "${work:?}/$name" --version "$version" "$name"
    mkdir -p "$tools"
    mv "$work/$name/bin/$name" "$tools/$name-$version"
}

# Makes $work, an empty folder for images and mount points, which goes when the script ends, with
# all that is mounted in it.
make_work() {
    work=$(mktemp -d "${TMPDIR:-/var/tmp}/gpunvme-${0##*/}.XXXXXX")
    trap 'exit 130' INT TERM
    trap remove_work EXIT
}

remove_work() {
    local dir device process
    cd /
    # While their images still have a path. What is mounted goes with its mount.
    for device in $(losetup --noheadings --output NAME,BACK-FILE --list | awk -v work="$work/" 'index($2, work) == 1 { print $1 }'); do
        as_root losetup --detach "$device" || true
    done
    # The innermost mounts first. A daemon that hangs must not keep the script from ending: its
    # mount is cut off, and it is killed.
    for dir in $(awk -v work="$work/" 'index($2, work) == 1 { print $2 }' /proc/self/mounts | tac); do
        as_root timeout 60 umount "$dir" 2>/dev/null || as_root umount --force --lazy "$dir" || true
    done
    for process in $(pgrep -f "^[^ ]*mount[.](fuse[.])?gpunvme .*$work/" || true); do
        as_root timeout 30 tail --pid="$process" -f /dev/null || as_root kill -KILL "$process" || true
    done
    as_root rm -rf --one-file-system "$work"
}

# Mounts an image on a directory, which it makes, with the program in the folder $bin. Further
# arguments are the program's.
mount_volume() {
    mkdir -p "$2"
    as_root "${bin:?}/mount.gpunvme" "$@"
}

# loop_device FILE LENGTH: makes the file, and a loop device over it, whose name it prints.
loop_device() {
    truncate -s "$2" "$1"
    as_root losetup --find --show --direct-io=on "$1" 2>/dev/null || as_root losetup --find --show "$1"
}

# striped_device DIR LENGTH DEVICE...: makes a device of that length whose bytes lie on these
# devices in turns, and prints its name. btrfs, which it mounts on DIR, does so where a kernel
# stripes no block devices; the device is a loop device over its file, which hands requests on and
# copies nothing. Needs mkfs.btrfs.
striped_device() {
    local dir=$1 len=$2
    shift 2
    mkdir -p "$dir"
    # Neither reads nor writes sum what they move, and writes go where the bytes lay.
    as_root mkfs.btrfs --quiet --force --data raid0 "$@" >/dev/null 2>&1 &&
        as_root mount -o "nodatacow$(printf ',device=%s' "$@")" "$1" "$dir" && loop_device "$dir/device" "$len"
}

# next_version LIST FOLDER: makes of the packages that a file lists the same as a version that
# follows.
next_version() {
    local package raw=${work:?}/raw
    while read -r package; do
        dpkg-deb --raw-extract "$package" "$raw"
        sed -i 's/^\(Version: .*\)-1$/\1-2/; s/(= \(.*\)-1)/(= \1-2)/' "$raw/DEBIAN/control"
        dpkg-deb -Znone --root-owner-group --build "$raw" "$2/${package##*/}" >/dev/null
        rm -r "$raw"
    done <"$1"
}
