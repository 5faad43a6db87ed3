//! The entry in `/run/mount/utab`, by which umount(8) finds its helper: each mount has one, and
//! nothing else of that file changes.
//!
//! Each test has a mount namespace of its own, with the helpers and an empty table.

use std::process::Command;

use gpunvme_tests::mounted::{Image, text};
use gpunvme_tests::{needs_mount, programs, report_skipped};

/// What is before each script: the helpers where mount(8) looks for them, and an empty table.
const NAMESPACE: &str = r#"
work=$(dirname "$image")
mkdir "$work/sbin" "$work/e" "$work/mnt"
mount -t tmpfs tmpfs "$work/sbin"
mkdir "$work/sbin/upper" "$work/sbin/work"
mount -t overlay -o "lowerdir=/usr/sbin,upperdir=$work/sbin/upper,workdir=$work/sbin/work" overlay /usr/sbin || exit 77
for helper in mount.gpunvme mount.fuse.gpunvme umount.fuse.gpunvme; do ln -sf "$program" /usr/sbin/$helper; done
mkdir -p /run/mount
mount -t tmpfs -o mode=755 tmpfs /run/mount
cd "$work"
d=$work/mnt e=$work/e
table() { if [ -s /run/mount/utab ]; then sed "s,$work/,,g" /run/mount/utab; else echo none; fi; }
# mount.gpunvme's child writes when mount(8) has ended.
settled() { for i in $(seq 100); do if grep -q "TARGET=$1 " /run/mount/utab 2>/dev/null; then break; fi; sleep 0.02; done; table; }
"#;

/// What a script says; `None`, said aloud, where there can be no such namespace.
fn says(test: &str, script: &str) -> Option<String> {
    let image = Image::formatted_with(64 << 20);
    let output = Command::new("timeout")
        .args(["-s", "KILL", "120", "unshare", "--mount", "--propagation", "private", "sh", "-c"])
        .arg(format!("{NAMESPACE}\n{script}"))
        .env("program", programs::path("mount.gpunvme"))
        .env("image", image.path())
        .output()
        .unwrap();
    if output.status.code() == Some(77) {
        report_skipped(test, "no overlay can be had here");
        return None;
    }
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    Some(String::from_utf8(output.stdout).unwrap())
}

const OURS: &str = "SRC=image TARGET=mnt ROOT=/ OPTS=x-gpunvme\n";

#[test]
fn a_mount_has_an_entry_until_it_is_unmounted_however_that_is_done() {
    needs_mount!();
    let script = r#"
m() { mount -t gpunvme "$image" "$d"; settled "$d"; }
m; umount "$d"; table
m; /usr/sbin/umount.fuse.gpunvme "$d"; table
m; umount -n "$d"; table
m; umount -R "$d"; table
m; umount -A "$d"; table
m; umount -l "$d"; table
# One that another namespace keeps ends with 64.
"$program" "$image" "$d"; table
unshare --mount --propagation private sleep 1000 >/dev/null 2>&1 & sleep 0.5
umount "$d" 2>/dev/null; echo $?; table; kill $!
"#;
    let Some(said) = says("a_mount_has_an_entry_until_it_is_unmounted_however_that_is_done", script) else { return };
    let expected = [OURS, "none\n"].concat().repeat(6) + OURS + "64\nnone\n";
    assert_eq!(said, expected);
}

#[test]
fn a_mount_takes_away_entries_that_were_left_and_no_other() {
    needs_mount!();
    let script = r#"
"$program" "$image" "$d"; settled "$d"
# Longer than the program that wrote it looks after it.
sleep 1.5
daemon() {
    for process in /proc/[0-9]*; do
        if [ "$(readlink $process/exe)" = "$(readlink -f "$program")" ] && grep -q "$image" $process/cmdline; then
            echo ${process#/proc/}
        fi
    done 2>/dev/null
}
kill -TERM $(daemon); while [ "$(daemon)" ]; do sleep 0.02; done; table
mkdir "$work/f" && mount -t tmpfs x "$work/f"
cat >>/run/mount/utab <<END
SRC=$image TARGET=/elsewhere ROOT=/ OPTS=x-gpunvme
SRC=/other TARGET=/gone ROOT=/ OPTS=x-gpunvme
SRC=/other TARGET=/gone ROOT=/ ATTRS=x OPTS=x-gpunvme
SRC=/other TARGET=/gone ROOT=/ OPTS=x-other
SRC=/other TARGET=$work/f ROOT=/ OPTS=x-gpunvme
END
"$program" "$image" "$e"; settled "$e"; umount "$e"
"#;
    let Some(said) = says("a_mount_takes_away_entries_that_were_left_and_no_other", script) else { return };
    let kept = "SRC=image TARGET=/elsewhere ROOT=/ OPTS=x-gpunvme\n\
                SRC=/other TARGET=/gone ROOT=/ ATTRS=x OPTS=x-gpunvme\n\
                SRC=/other TARGET=/gone ROOT=/ OPTS=x-other\n\
                SRC=/other TARGET=f ROOT=/ OPTS=x-gpunvme\n\
                SRC=image TARGET=e ROOT=/ OPTS=x-gpunvme\n";
    // The daemon of the image lives: its first entry may be one of another namespace.
    assert_eq!(said, OURS.repeat(3) + kept);
}

#[test]
fn an_entry_keeps_no_option_of_mount_and_no_other_entry_away() {
    needs_mount!();
    let script = r#"
m() { mount -t gpunvme -o "$1" "$image" "$d"; settled "$d"; }
m _netdev,x-foo; sleep 0.3; table; umount -a -t fuse.gpunvme -O _netdev; table
# One that was left there, of the same mount.
echo "SRC=$image TARGET=$d ROOT=/ OPTS=x-gpunvme" >/run/mount/utab
m _netdev,x-foo; umount "$d"; table
# A mount below has an entry, which umount(8) leaves because it finds another behind it.
mount -t tmpfs -o x-lower tmpfs "$d"
"$program" "$image" "$d"; table; umount "$d"; table
"$program" "$image" "$d"; /usr/sbin/umount.fuse.gpunvme "$d"; table; umount "$d"; table
# Of the same directory in another namespace, and of others.
printf 'SRC=a TARGET=%s ROOT=/ OPTS=x-other\nSRC=%s TARGET=%s/b ROOT=/ OPTS=x-gpunvme\nbroken' "$d" "$image" "$d" >/run/mount/utab
"$program" "$image" "$d"; /usr/sbin/umount.fuse.gpunvme "$d"; table
"#;
    let Some(said) = says("an_entry_keeps_no_option_of_mount_and_no_other_entry_away", script) else { return };
    let netdev = "SRC=image TARGET=mnt ROOT=/ OPTS=_netdev,x-foo\n";
    let lower = "SRC=tmpfs TARGET=mnt ROOT=/ OPTS=x-lower\n";
    let others = "SRC=a TARGET=mnt ROOT=/ OPTS=x-other\nSRC=image TARGET=mnt/b ROOT=/ OPTS=x-gpunvme\nbroken\n";
    let expected = [netdev, netdev, "none\n", netdev, "none\n", lower, OURS, lower, lower, "none\n", others];
    assert_eq!(said, expected.concat());
}

#[test]
fn nobody_who_locks_the_table_holds_up_a_mount() {
    needs_mount!();
    let script = r#"
touch /run/mount/utab.lock
setpriv --reuid=65534 --regid=65534 --clear-groups flock -F /run/mount/utab.lock sleep 1000 >/dev/null 2>&1 & sleep 0.3
# Who reads to the end of a pipe does not wait either.
echo "$(timeout 20 mount -t gpunvme "$image" "$d" 2>&1)"; grep -c "^$image " /proc/mounts
timeout 20 /usr/sbin/umount.fuse.gpunvme "$d"; echo $?
timeout 20 "$program" "$image" "$d"; echo $?
timeout 20 umount "$d"; echo $?
kill $!
"#;
    let Some(said) = says("nobody_who_locks_the_table_holds_up_a_mount", script) else { return };
    assert_eq!(said, "\n1\n0\n0\n0\n");
}

#[test]
fn a_table_that_may_not_grow_costs_a_mount_nothing() {
    needs_mount!();
    let script = r#"
for i in $(seq 200); do echo "SRC=/a$i TARGET=/b$i ROOT=/ OPTS=x-other"; done >/run/mount/utab
before=$(cat /run/mount/utab)
"$program" "$image" "$d"; /usr/sbin/umount.fuse.gpunvme "$d"
prlimit --fsize=4096 sh -c '"$program" -o ro "$image" "$1"; echo $?' sh "$d" || echo killed
[ "$before" = "$(cat /run/mount/utab)" ] && ls /run/mount
umount -l "$d"
"#;
    let Some(said) = says("a_table_that_may_not_grow_costs_a_mount_nothing", script) else { return };
    assert_eq!(said, "0\nutab\nutab.lock\n");
}

#[test]
fn an_unmount_while_the_entry_is_made_leaves_none() {
    needs_mount!();
    let script = r#"
for i in $(seq 10); do
    mount -t gpunvme "$image" "$d" & while ! grep -q "^$image " /proc/mounts; do :; done
    umount "$d"; wait $!; sleep 0.2
    # The one that was written is taken back: soon, if the machine has other work.
    for i in $(seq 250); do if [ ! -s /run/mount/utab ]; then break; fi; sleep 0.02; done; table
done
"#;
    let Some(said) = says("an_unmount_while_the_entry_is_made_leaves_none", script) else { return };
    assert_eq!(said, "none\n".repeat(10));
}

#[test]
fn the_last_of_several_places_of_a_mount_has_an_entry() {
    needs_mount!();
    let script = r#"
mount -t gpunvme "$image" "$d"; settled "$d"
mount --bind "$d" "$e"; umount "$d"; table
umount "$e"; table
"#;
    let Some(said) = says("the_last_of_several_places_of_a_mount_has_an_entry", script) else { return };
    assert_eq!(said, [OURS, "SRC=image TARGET=e ROOT=/ OPTS=x-gpunvme\n", "none\n"].concat());
}
