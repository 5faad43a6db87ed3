//! Tests with programs that people run on a filesystem: git, tar, rsync, cp, dd, find, a C
//! compiler, sqlite, and the tools for locks, ACLs and capabilities. Each does its own checking.

use std::fs::{self, File};
use std::process::Command;

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, report_skipped};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

/// Runs a shell script in a folder on a fresh volume, then remounts and runs another there.
fn run(test: &str, needs: &[&str], script: &str, after: &str) {
    for program in needs {
        if !Command::new("which").arg(program).output().unwrap().status.success() {
            return report_skipped(test, &format!("needs {program}"));
        }
    }
    let mut volume = Mounted::new();
    for script in [script, after] {
        let output = Command::new("sh")
            .args(["-euxc", script])
            .current_dir(volume.root())
            .env("HOME", volume.image().mount_point().with_file_name("home"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output));
        volume = volume.remount();
    }
}

#[test]
fn git_clones_commits_and_checks() {
    needs_mount!();
    run(
        "git_clones_commits_and_checks",
        &["git"],
        r#"
        git init -q -b main first && cd first
        git config user.name test && git config user.email test@example.com
        cp -r /usr/include/linux . && git add . && git commit -qm one
        for i in $(seq 20); do echo $i >> linux/fs.h; git commit -qam "change $i"; done
        git checkout -q -b other HEAD~10 && echo y > new && git add new && git commit -qm new
        git merge -q main -m merge
        cd .. && git clone -q first second && cd second && git checkout -q main
        git fsck --strict && git gc -q && git fsck --strict && test -z "$(git status --porcelain)"
        "#,
        r#"cd second && git fsck --strict && test -z "$(git status --porcelain)" && diff -r ../first/linux linux"#,
    );
}

#[test]
fn tar_and_rsync_bring_back_what_they_took() {
    needs_mount!();
    run(
        "tar_and_rsync_bring_back_what_they_took",
        &["tar", "rsync"],
        r#"
        rsync -aHAX /usr/include/ include/
        test -z "$(rsync -aHAXni --checksum /usr/include/ include/)"
        tar --acls --xattrs -cf include.tar include && mkdir out && tar --acls --xattrs -xf include.tar -C out
        tar -df include.tar && diff -r include out/include
        "#,
        r#"tar -df include.tar && diff -r include out/include && test -z "$(rsync -aHAXni --checksum /usr/include/ include/)""#,
    );
}

#[test]
fn a_compiler_builds_programs_that_run() {
    needs_mount!();
    run(
        "a_compiler_builds_programs_that_run",
        &["cc", "ar"],
        r#"
        for i in $(seq 30); do echo "int f$i(int x) { return x + $i; }" > f$i.c; cc -O1 -c f$i.c; done
        ar rc libf.a f*.o
        { for i in $(seq 30); do echo "int f$i(int);"; done; echo 'int main(void) { int x = 0;'
          for i in $(seq 30); do echo "x = f$i(x);"; done; echo 'return x == 465 ? 0 : 1; }'; } > main.c
        cc main.c -L. -lf -o main && ./main
        "#,
        "./main && touch f1.c && test f1.c -nt main",
    );
}

#[test]
fn sqlite_keeps_its_promises() {
    needs_mount!();
    run(
        "sqlite_keeps_its_promises",
        &["sqlite3"],
        r#"
        for mode in delete wal; do
            sqlite3 $mode.db "pragma journal_mode=$mode; create table t(a integer primary key, b blob);"
            for i in $(seq 30); do
                sqlite3 $mode.db "insert into t(b) select randomblob(3000) from generate_series(1, 50);
                                  update t set b = zeroblob(100) where a % 7 = $i % 7; delete from t where a % 11 = $i % 11;"
            done
            sqlite3 $mode.db "vacuum;"
            test "$(sqlite3 $mode.db 'pragma integrity_check;')" = ok
        done
        "#,
        r#"for mode in delete wal; do test "$(sqlite3 $mode.db 'pragma integrity_check;')" = ok; done"#,
    );
}

#[test]
fn copies_keep_holes_acls_attributes_and_links() {
    needs_mount!();
    run(
        "copies_keep_holes_acls_attributes_and_links",
        &["cp", "tar", "rsync", "setfacl", "getfacl", "setfattr", "setcap"],
        r#"
        mkdir from && cd from
        truncate -s 100M sparse && printf data | dd of=sparse bs=1 seek=50M conv=notrunc status=none
        echo content > file && ln file link && ln -s nowhere symlink && mkfifo fifo
        setfacl -m u:daemon:rw,g:daemon:r,m::rw file && setfattr -n user.colour -v red file
        mkdir dir && setfacl -d -m u:daemon:rwx,g::rx dir && touch dir/inherits && mkdir dir/sub
        cp /bin/true program && setcap cap_net_raw+ep program
        getfacl -R . > ../acls && { getfattr -R -d -m - . > ../attributes 2>/dev/null || true; } && cd ..
        grep -q 'user:daemon:rwx' acls && grep -q 'default:user:daemon:rwx' acls

        cp -a --reflink=auto from cp
        rsync -aHAXS from/ rsync
        mkdir tar && tar --acls --xattrs --xattrs-include='*' -cSf tar.tar -C from . && tar --acls --xattrs --xattrs-include='*' -xpf tar.tar -C tar
        for to in cp rsync tar; do
            cmp from/sparse $to/sparse
            test $(du -k $to/sparse | cut -f 1) -lt 1024
            (cd $to && getfacl -R .) | cmp - acls
            (cd $to && { getfattr -R -d -m - . 2>/dev/null || true; }) | cmp - attributes
            test $to/file -ef $to/link && test -p $to/fifo && test "$(readlink $to/symlink)" = nowhere
            getcap $to/program | grep -q cap_net_raw
        done
        # A write to a program takes its capabilities away.
        echo more >> cp/program && test -z "$(getcap cp/program)"
        cp --sparse=always from/sparse always && cmp from/sparse always && test $(du -k always | cut -f 1) -lt 1024
        cp --sparse=never from/sparse never && cmp from/sparse never && test $(du -k never | cut -f 1) -ge 102400
        "#,
        r#"for to in cp rsync tar; do cmp from/sparse $to/sparse; (cd $to && getfacl -R .) | cmp - acls; done"#,
    );
}

#[test]
fn an_acl_decides_who_gets_in_and_chmod_moves_its_mask() {
    needs_mount!();
    run(
        "an_acl_decides_who_gets_in_and_chmod_moves_its_mask",
        &["setfacl", "getfacl", "setpriv"],
        r#"
        chmod 755 . && echo secret > file && chmod 600 file
        daemon() { setpriv --reuid=1 --regid=1 --clear-groups "$@"; }
        ! daemon cat file 2>/dev/null
        setfacl -m u:1:r file && test "$(daemon cat file)" = secret && test $(stat -c %a file) = 640
        ! daemon sh -c 'echo x >> file' 2>/dev/null
        chmod 600 file && ! daemon cat file 2>/dev/null
        chmod 640 file && test "$(daemon cat file)" = secret
        setfacl -b file && test -z "$(getfattr -d -m - file 2>/dev/null)" && ! daemon cat file 2>/dev/null
        mkdir dir && setfacl -d -m u:1:rwx dir && (umask 077; mkdir dir/sub; echo x > dir/sub/file)
        daemon cat dir/sub/file && daemon touch dir/sub/new
        "#,
        "setpriv --reuid=1 --regid=1 --clear-groups cat dir/sub/file",
    );
}

#[test]
fn dd_and_many_appenders_write_every_way_there_is() {
    needs_mount!();
    run(
        "dd_and_many_appenders_write_every_way_there_is",
        &["dd", "find"],
        r#"
        dd if=/dev/urandom of=a bs=64k count=40 status=none
        for how in conv=fsync conv=fdatasync oflag=direct oflag=sync oflag=dsync oflag=direct,dsync oflag=append; do
            dd if=a of=b-$how bs=64k $how status=none && cmp a b-$how
            dd if=a of=b-$how bs=64k conv=notrunc,nocreat oflag=direct iflag=direct status=none && cmp a b-$how
        done
        test $(du -k a | cut -f 1) = 2560

        for writer in 1 2 3 4 5 6 7 8; do
            (for i in $(seq 300); do echo "$writer $i and a tail that makes lines meet in blocks" >> log; done) &
        done
        wait
        test $(wc -l < log) = 2400 && test $(sort -u log | wc -l) = 2400 && ! grep -v '^[1-8] [0-9]* and a tail that makes lines meet in blocks$' log

        touch before && sleep 0.02 && echo x >> log && touch after
        test "$(find . -newer before ! -newer after -name 'l*')" = ./log && test -z "$(find . -newer after)"
        used=$(df -k --output=used . | tail -n 1) && dd if=/dev/zero of=big bs=1M count=64 conv=fsync status=none
        test $(df -k --output=used . | tail -n 1) -ge $((used + 65536))
        "#,
        "cmp a b-conv=fsync && test $(sort -u log | wc -l) = 2401",
    );
}

#[test]
fn locks_hold_between_processes() {
    needs_mount!();
    run(
        "locks_hold_between_processes",
        &["flock", "sqlite3"],
        r#"
        touch lock && mkfifo go
        flock -x lock sh -c 'echo > go; read line < go' &
        read line < go
        ! flock -n -x lock true && ! flock -n -s lock true && flock -n -x other true
        echo > go; wait && flock -n -x lock true

        # sqlite locks with fcntl(2).
        sqlite3 db 'create table t(a); insert into t values(1);'
        { echo 'begin exclusive; insert into t values(2); select 1;'; read line < go; echo 'commit;'; } | sqlite3 db > out &
        until test -s out; do sleep 0.01; done
        ! sqlite3 db 'insert into t values(3);' 2>/dev/null
        echo > go; wait && sqlite3 db 'insert into t values(3);' && test $(sqlite3 db 'select sum(a) from t;') = 6
        "#,
        "test $(sqlite3 db 'select sum(a) from t;') = 6",
    );
}

#[test]
fn inotify_tells_what_happens_in_a_folder() {
    needs_mount!();
    let volume = Mounted::new();
    let watch = inotify::init(CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, volume.root(), WatchFlags::ALL_EVENTS).unwrap();
    File::create(volume.path("new")).unwrap();
    fs::write(volume.path("new"), "content").unwrap();
    fs::rename(volume.path("new"), volume.path("moved")).unwrap();
    fs::remove_file(volume.path("moved")).unwrap();
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    let mut seen = Vec::new();
    while let Ok(event) = events.next() {
        let name = event.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        seen.push((event.events(), name));
    }
    for (event, name) in [
        (ReadFlags::CREATE, "new"),
        (ReadFlags::MODIFY, "new"),
        (ReadFlags::CLOSE_WRITE, "new"),
        (ReadFlags::MOVED_FROM, "new"),
        (ReadFlags::MOVED_TO, "moved"),
        (ReadFlags::DELETE, "moved"),
    ] {
        assert!(seen.contains(&(event, name.to_owned())), "{event:?} {name}: {seen:?}");
    }
}
