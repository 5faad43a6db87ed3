//! The commands `hydrate`, `publish`, `evict` and `stage`, which another program does with the same
//! command line: what speaks HTTP and TLS is no part of the program that root runs on controllers.

use crate::report::{Failure, Report};
use gpunvme_programs::sets::PROGRAM;
use std::convert::Infallible;
use std::os::unix::process::CommandExt;
use std::process::Command;

pub fn run() -> Result<Report, Failure> {
    let program = std::env::current_exe()?.with_file_name(PROGRAM);
    let result: Result<Infallible, _> = Err(Command::new(&program).args(std::env::args_os().skip(1)).exec()); // it returns where it fails
    result.map(|never| match never {}).map_err(|error| Failure(format!("{}: {error}", program.display())))
}
