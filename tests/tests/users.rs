//! What people run on a filesystem: git, tar, rsync, a C compiler, sqlite. Each does its own checking.

use std::process::Command;

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, report_skipped};

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
            .args(["-euc", script])
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
