//! The program `gpunvme-stage`: sets of files between object stores and a folder. Its commands are
//! those of `gpunvme`, which hands them on: the program that root runs on controllers has no HTTP
//! and no TLS in it.

mod checksums;
mod error;
mod evict;
mod exclusive;
mod folder;
mod hydrate;
mod journal;
mod manifest;
mod memory;
mod names;
mod own;
mod profiles;
mod progress;
mod publish;
mod quota;
mod ranks;
mod remote;
mod reservation;
mod sets;
mod share;
mod store;
mod upload;

use clap::{Parser, Subcommand};
use error::{Error, Result};
use gpunvme_programs::completions::{Completions, Printed};
use gpunvme_programs::terminal::{complain, print};
use quota::Quota;
use ranks::Rank;
use reservation::Limit;
use share::Share;
use std::path::PathBuf;
use std::process::ExitCode;
use store::Store;

/// Datasets in, checkpoints out: sets of files between object stores and a folder
#[derive(Parser)]
#[command(name = "gpunvme-stage", version, propagate_version = true, arg_required_else_help = true)]
struct Args {
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    /// Print what a shell needs to complete this command line
    #[arg(long, value_name = "SHELL", value_parser = Completions)]
    completions: Option<Printed>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Bring a set of objects into a folder of a mount
    Hydrate(Hydrate),
    /// Bring a folder of a mount into a store
    Publish(Publish),
    /// Remove sets that were hydrated, the least recently used first, until the others keep a quota
    Evict(Evict),
    /// What sets there are
    #[command(subcommand)]
    Stage(Stage),
}

#[derive(Subcommand)]
enum Stage {
    /// What the sets below a folder hold, and when they were used
    Status {
        folder: PathBuf,
        /// Also name the files that were evicted
        #[arg(long)]
        evicted: bool,
    },
}

#[derive(clap::Args)]
struct Evict {
    /// The folder that the sets are below
    folder: PathBuf,
    /// What they may hold together: bytes, with K, M, G or T, or a percentage of the filesystem
    #[arg(long, value_name = "QUOTA")]
    quota: Quota,
    /// Tell what would go if nothing is open, and remove nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(clap::Args)]
struct Limits {
    /// How many parts are in flight
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    concurrency: u16,
    /// Memory for parts, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    memory: u32,
    /// Say on standard error how far it is, in lines of JSON
    #[arg(long)]
    progress: bool,
}

#[derive(clap::Args)]
struct Hydrate {
    /// s3://BUCKET/PREFIX, gs://, az://, https://, file:///PATH, or a folder
    source: String,
    /// The folder; made where there is none
    folder: PathBuf,
    /// Only objects whose names in the set match: `*` stands for any characters, `?` for one
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// Only each N-th object, beginning with the I-th
    #[arg(long, value_name = "I/N")]
    rank: Option<Share>,
    /// What of an object is compared before its file appears
    #[arg(long, value_enum, default_value_t = Verify::Checksum)]
    verify: Verify,
    /// Never evict the set
    #[arg(long)]
    pin: bool,
    /// What the sets below the folder of --sets may hold together, this one among them: bytes, with
    /// K, M, G or T, or a percentage of the filesystem. Others go before anything is fetched
    #[arg(long, value_name = "QUOTA")]
    quota: Option<Quota>,
    /// The folder that the sets of the quota are below; the one above FOLDER unless told
    #[arg(long, value_name = "DIR", requires = "quota")]
    sets: Option<PathBuf>,
    /// Fail unless the set was published whole
    #[arg(long)]
    published: bool,
    /// Tell what would be fetched, and fetch nothing
    #[arg(long)]
    dry_run: bool,
    /// Also say, in such lines as --progress, which bytes of which files are there
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    limits: Limits,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Verify {
    /// Its length, and the checksum that the set's manifest has, or else the store
    Checksum,
    /// Its length
    None,
}

#[derive(clap::Args)]
struct Publish {
    /// The folder
    folder: PathBuf,
    /// s3://BUCKET/PREFIX, gs://, az://, file:///PATH, or a folder
    destination: String,
    /// The folder is the I-th of N that the set is published from; the last of them makes it valid
    #[arg(long, value_name = "I/N", requires = "attempt")]
    rank: Option<Share>,
    /// What all ranks of one set have in common, and no earlier try to publish it there had
    #[arg(long, value_name = "NAME", requires = "rank")]
    attempt: Option<String>,
    /// Of the published sets beside the destination, itself among them, keep the N newest
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep: Option<u32>,
    #[command(flatten)]
    limits: Limits,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(&args) {
        Ok(text) => match print(format_args!("{text}\n")) {
            Err(error) => {
                complain(format_args!("gpunvme: done, but the report could not be written: {error}"));
                ExitCode::FAILURE
            }
            Ok(()) => ExitCode::SUCCESS,
        },
        Err(error) => {
            complain(format_args!("gpunvme: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<String> {
    // It fails where another one is set already, and that does as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Error::Runtime)?;
    match &args.command {
        Command::Hydrate(hydrate) => {
            let done = runtime.block_on(hydrate::hydrate(hydrate::Hydration {
                source: Store::source(&hydrate.source)?,
                folder: hydrate.folder.clone(),
                include: hydrate.include.clone(),
                share: hydrate.rank,
                concurrency: hydrate.limits.concurrency.into(),
                memory: u64::from(hydrate.limits.memory) << 20,
                progress: hydrate.limits.progress,
                follow: hydrate.follow,
                verify: hydrate.verify == Verify::Checksum,
                pin: hydrate.pin,
                limit: hydrate.quota.map(|quota| Limit { root: hydrate.sets.clone(), quota }),
                published: hydrate.published,
                dry_run: hydrate.dry_run,
            }))?;
            let what = if hydrate.dry_run { "to be fetched" } else { "fetched" };
            let mut text = format!(
                "{} objects, {} bytes; {what}: {}, {} bytes",
                done.objects, done.bytes, done.fetched_objects, done.fetched_bytes
            );
            if done.evicted.evicted_bytes > 0 {
                let what = if hydrate.dry_run { "to be evicted" } else { "evicted" };
                text += &format!("; {what}: {}", done.evicted);
            }
            Ok(shown(args.json, &done, text))
        }
        Command::Publish(publish) => {
            let done = runtime.block_on(publish::publish(publish::Publication {
                folder: publish.folder.clone(),
                destination: Store::destination(&publish.destination)?,
                rank: publish.rank.zip(publish.attempt.clone()).map(|(share, attempt)| Rank { share, attempt }),
                keep: publish.keep.map(|keep| keep as usize),
                concurrency: publish.limits.concurrency.into(),
                memory: u64::from(publish.limits.memory) << 20,
                progress: publish.limits.progress,
            }))?;
            let mut text =
                format!("{} files, {} bytes; sent: {}, {} bytes", done.files, done.bytes, done.sent_files, done.sent_bytes);
            if done.ranks > 1 {
                text += &format!("; ranks done: {} of {}", done.ranks_there, done.ranks);
            }
            if done.removed_sets > 0 {
                text += &format!("; {} older sets removed", done.removed_sets);
            }
            Ok(shown(args.json, &done, text))
        }
        Command::Evict(Evict { folder, quota, dry_run }) => {
            let done = evict::evict(&evict::Eviction { root: folder.clone(), quota: *quota, dry_run: *dry_run })?;
            let what = if *dry_run { "to be evicted" } else { "evicted" };
            let text = format!("{what}: {}; {} bytes stay, {} may", done.evicted, done.bytes, done.quota);
            Ok(shown(args.json, &done, text))
        }
        Command::Stage(Stage::Status { folder, evicted }) => {
            let sets = sets::below(folder)?;
            let text = sets::table(&sets, *evicted);
            Ok(shown(args.json, &sets, text))
        }
    }
}

fn shown(json: bool, done: &impl serde::Serialize, text: String) -> String {
    if json { serde_json::to_string_pretty(done).expect("numbers have a form in JSON") } else { text }
}
