//! Questions about mounts and devices that may never be answered, put by a process of its own.
//!
//! A thread that waits for a FUSE server, which any user may write, cannot be ended. It holds what
//! its process has open, and the process itself is not gone before it. So a child asks, which has
//! nothing open but its answer, and is left to itself where it gets none.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use gpunvme_blockdev::OpenMode;
use gpunvme_programs::claim::{ClaimError, await_release, may_have_writer};
use gpunvme_programs::limited::within;
use gpunvme_programs::members;
use gpunvme_programs::mounts::{self, Mount};
use gpunvme_programs::terminal;

/// The first argument of a process that puts a question.
const ARGUMENT: &str = "--question";
/// How long the daemon of a mount that lives may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
const YES: &str = "yes";
const NO: &str = "no";

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Of a directory: whether the daemon of the mount there has gone without unmounting it.
    IsDead,
    /// Of a device: whether a program may write to it.
    HasWriter,
    /// Of a device: whether its daemon has let go of it, which is waited for.
    IsReleased,
    /// Of a device: whether its volume was left with nothing in its journal.
    IsClean,
}

/// What a device's daemon, or its volume, turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// As was asked.
    Yes,
    /// Not so.
    No,
    /// It is mounted again.
    Mounted,
    /// It cannot be told, for this reason.
    Unknown(String),
}

impl Question {
    const ALL: [Question; 4] = [Question::IsDead, Question::HasWriter, Question::IsReleased, Question::IsClean];

    fn name(self) -> &'static str {
        match self {
            Question::IsDead => "is-dead",
            Question::HasWriter => "has-writer",
            Question::IsReleased => "is-released",
            Question::IsClean => "is-clean",
        }
    }

    /// The answer; `None` where there is none within `limit`.
    pub fn ask(self, of: &OsStr, limit: Duration) -> Option<Found> {
        let mut asking = Command::new("/proc/self/exe");
        asking.arg0("mount.gpunvme").args([ARGUMENT, self.name()]).arg(of);
        let mut child = asking.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
        let mut answer = child.stdout.take()?;
        let text = within(limit, move || {
            let mut text = String::new();
            answer.read_to_string(&mut text).map(|_| text)
        });
        // It may not end for as long as it gets no answer, and is not waited for.
        let _ = child.kill();
        let text = text?.ok()?;
        let _ = child.wait();
        Found::parse(&text)
    }

    /// The same, by this process.
    fn answer(self, of: &OsStr) -> Found {
        let device = of.to_string_lossy();
        let yes = |is: bool| if is { Found::Yes } else { Found::No };
        match self {
            Question::IsDead => yes(mounts::is_dead(of.as_ref())),
            Question::HasWriter => yes(may_have_writer(&device)),
            Question::IsReleased => match await_release(&device) {
                Ok(()) => Found::Yes,
                // It went on from what there was.
                Err(ClaimError::Mounted(_)) => Found::Mounted,
                Err(ClaimError::Held) => Found::No,
                Err(error) => Found::Unknown(format!("{device}: {error}")),
            },
            Question::IsClean => {
                let opened = members::open(&device, &[], OpenMode::ReadOnly).map_err(|error| format!("{device}: {error}"));
                let is_clean = opened.and_then(|device| gpunvme_engine::is_clean(&device).map_err(|error| error.to_string()));
                is_clean.map_or_else(Found::Unknown, yes)
            }
        }
    }
}

impl Found {
    fn text(&self) -> String {
        match self {
            Found::Yes => YES.to_owned(),
            Found::No => NO.to_owned(),
            Found::Mounted => "mounted".to_owned(),
            Found::Unknown(why) => format!("unknown {why}"),
        }
    }

    fn parse(text: &str) -> Option<Found> {
        match text {
            YES => Some(Found::Yes),
            NO => Some(Found::No),
            "mounted" => Some(Found::Mounted),
            _ => Some(Found::Unknown(text.strip_prefix("unknown ")?.to_owned())),
        }
    }
}

/// Whether the daemon of a mount has gone without unmounting it. One that was stopped has not.
pub fn is_dead(mount: &Mount) -> bool {
    Question::IsDead.ask(mount.dir.as_os_str(), ANSWER_LIMIT) == Some(Found::Yes)
}

/// Answers, where this process was begun to put a question. Returns its exit code.
pub fn answered(arguments: &[OsString]) -> Option<u8> {
    let [_, argument, name, of] = arguments else { return None };
    let question = Question::ALL.into_iter().find(|question| name == question.name()).filter(|_| argument == ARGUMENT)?;
    Some(u8::from(terminal::print(format_args!("{}", question.answer(of).text())).is_err()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_arrive_as_they_were_given() {
        for found in [Found::Yes, Found::No, Found::Mounted, Found::Unknown("it is\nno device".to_owned())] {
            assert_eq!(Found::parse(&found.text()), Some(found));
        }
        assert_eq!(Found::parse(""), None);
    }

    #[test]
    fn other_arguments_are_no_question() {
        let arguments = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        for words in
            [&["mount.gpunvme"][..], &["mount.gpunvme", "/dev/sda", "/mnt", "-r"], &["mount.gpunvme", ARGUMENT, "why", "/"]]
        {
            assert_eq!(answered(&arguments(words)), None, "{words:?}");
        }
    }
}
