//! What a shell completes of a program's command line, made from the definition that the program
//! itself parses by, so that neither has options that the other lacks.

use std::ffi::OsStr;

use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::{Arg, Command, Error};
use clap_complete::{Shell, generate};

/// The parser of the option `--completions SHELL`, which every program has.
///
/// Like `--help` it ends the parse with a text for standard output, and success.
#[derive(Clone, Copy, Debug)]
pub struct Completions;

/// The value of `--completions`, of which there is none: the program ends before.
#[derive(Clone, Copy, Debug)]
pub enum Printed {}

impl TypedValueParser for Completions {
    type Value = Printed;

    fn parse_ref(&self, command: &Command, option: Option<&Arg>, shell: &OsStr) -> Result<Printed, Error> {
        let shell = EnumValueParser::<Shell>::new().parse_ref(command, option, shell)?;
        // clap has one error whose text is printed as it is: the help.
        let mut help = Command::new("completions").override_help(script(command.clone(), shell));
        help.try_get_matches_from_mut(["completions", "--help"])?;
        unreachable!("--help ends a parse")
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        // Their iterator borrows a parser that would not outlive this call.
        Some(Box::new(EnumValueParser::<Shell>::new().possible_values()?.collect::<Vec<_>>().into_iter()))
    }
}

/// The script that tells `shell` what to complete of `command`.
fn script(mut command: Command, shell: Shell) -> String {
    let mut script = Vec::new();
    let name = command.get_name().to_owned();
    // For bash clap_complete writes a name with a hyphen in two ways, and neither finds the other.
    let plain = if shell == Shell::Bash { name.replace('-', "_") } else { name.clone() };
    generate(shell, &mut command, &plain, &mut script);
    let script = String::from_utf8(script).expect("names and descriptions of options are UTF-8");
    script.replace(&format!(" {plain}\n"), &format!(" {name}\n"))
}
