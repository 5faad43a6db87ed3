//! The commands `hydrate`, `publish`, `evict` and `stage`, which the program `gpunvme-stage` has:
//! what speaks HTTP and TLS is no part of the program that root runs on controllers.

use crate::report::{Failure, Report};
use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

const PROGRAM: &str = "gpunvme-stage";

#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Stage {
    /// As `gpunvme-stage` has them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

pub fn run(name: &str, stage: &Stage, json: bool) -> Result<Report, Failure> {
    let program = std::env::current_exe()?.with_file_name(PROGRAM);
    let mut command = Command::new(&program);
    command.args(json.then_some("--json")).arg(name).args(&stage.arguments);
    let result: Result<Infallible, _> = Err(command.exec()); // it returns where it fails
    result.map(|never| match never {}).map_err(|error| Failure(format!("{}: {error}", program.display())))
}
