//! Transactions of PostgreSQL, where it is installed.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpunvme_tests::peers::run;
use gpunvme_tests::results::Work;

use crate::Scale;
use crate::report::{Report, Rows};
use crate::subject::Subjects;

/// Clients of a database.
const CLIENTS: usize = 4;

/// `$BIN` is the folder of PostgreSQL's programs, `$DATA` that of its data.
const SET_UP: &str = r#"
mkdir "$DATA" && chown postgres "$DATA"
run() { runuser -u postgres -- "$@" >&2; }
run "$BIN/initdb" -D "$DATA" -A trust
run "$BIN/pg_ctl" -D "$DATA" -o "-k '$DATA' -c listen_addresses=" -l "$DATA/log" -w start
run "$BIN/pgbench" -h "$DATA" -q -i -s 10 postgres
run "$BIN/pg_ctl" -D "$DATA" -w stop
"#;
const TRANSACTIONS: &str = r#"
run() { runuser -u postgres -- "$@"; }
run "$BIN/pg_ctl" -D "$DATA" -o "-k '$DATA' -c listen_addresses=" -l "$DATA/log" -w start >&2
run "$BIN/pgbench" -h "$DATA" -c "$CLIENTS" -j 2 -T "$DURATION" postgres
run "$BIN/pg_ctl" -D "$DATA" -w stop >&2
"#;

/// pgbench, with PostgreSQL's own settings.
pub fn measure(subjects: &Subjects, scale: &Scale, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let Some(programs) = programs() else {
        eprintln!("database: left out, since PostgreSQL is not installed");
        return Ok(());
    };
    let shell = |script: &str, root: &Path| {
        let mut shell = Command::new("bash");
        shell.args(["-euc", script]).env("BIN", &programs).env("DATA", root.join("database")).current_dir(root);
        run(shell.env("CLIENTS", CLIENTS.to_string()).env("DURATION", scale.transactions.to_string()))
    };
    for (_, root) in subjects.all() {
        shell(SET_UP, root)?;
    }
    let mut rows = Rows::new("PostgreSQL", "1/s");
    for _ in 0..scale.runs {
        for (subject, root) in subjects.all() {
            let output = shell(TRANSACTIONS, root)?;
            let rate = output.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok());
            rows.add(&Work::named("pgbench, scale 10").by(CLIENTS), subject, rate.ok_or("pgbench names no rate")?);
        }
    }
    report.add(rows)?;
    Ok(subjects.all().try_for_each(|(_, root)| std::fs::remove_dir_all(root.join("database")))?)
}

/// The folder with pgbench and initdb, of the newest version.
fn programs() -> Option<PathBuf> {
    let mut folders: Vec<_> =
        std::fs::read_dir("/usr/lib/postgresql").ok()?.flatten().map(|entry| entry.path().join("bin")).collect();
    folders.retain(|folder| folder.join("pgbench").exists() && folder.join("initdb").exists());
    folders.sort();
    folders.pop()
}
