//! A second process for the tests of the direct path: it does one thing with a file, and prints the
//! result on stdout.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use clap::{Parser, Subcommand};
use gpunvme_abi::{Command, Segment, Transfer};
use gpunvme_tests::direct::{Buffer, call, memfd};

#[derive(Parser)]
struct Arguments {
    file: PathBuf,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// READ with a buffer that this process does not own; prints the errno, or 0.
    Borrow { buffer: u64 },
    /// READ with a grant, and no descriptor; prints the errno, or 0.
    Grant { grant: u64 },
    /// Registers a buffer of its own, prints a line, and reads into it until it is killed.
    Loop { len: u64 },
}

fn main() {
    let arguments = Arguments::parse();
    let file = File::open(&arguments.file).expect("the file");
    match arguments.action {
        Action::Borrow { buffer } => {
            let borrowed = Buffer { memory: memfd(4096), id: buffer };
            let errno = borrowed.read(&file, 0, 4096).err().and_then(|error| error.raw_os_error());
            println!("{}", errno.unwrap_or(0));
        }
        Action::Grant { grant } => {
            let buffer = Buffer::new(&file, 4096);
            let mut transfer = Transfer { buffer: buffer.id, segments: 1, descriptor: -1, grant, ..Transfer::default() };
            let segment = Segment { file_offset: 0, buffer_offset: 0, len: 4096 };
            let errno = call(&file, Command::Read, &mut transfer, &mut [segment]).err().and_then(|error| error.raw_os_error());
            println!("{}", errno.unwrap_or(0));
        }
        Action::Loop { len } => {
            let buffer = Buffer::new(&file, len);
            println!("reading");
            std::io::stdout().flush().expect("stdout");
            loop {
                buffer.transfer(Command::Read, &file, &[(0, 0, len)]).expect("READ");
            }
        }
    }
}
