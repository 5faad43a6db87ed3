//! The program `gpunvme-stage`: sets of files between object stores and a folder. Its commands are
//! those of `gpunvme`, which hands them on: the program that root runs on controllers has no HTTP
//! and no TLS in it.

mod checksums;
mod error;
mod evict;
mod exclusive;
mod folder;
mod follower;
mod hydrate;
mod journal;
mod listing;
mod manifest;
mod memory;
mod names;
mod own;
mod profiles;
mod progress;
mod publish;
mod ranks;
mod remote;
mod reservation;
mod selection;
mod sets;
mod store;
mod upload;

use clap::{Parser, Subcommand};
use error::{Error, Result, printable};
use gpunvme_programs::completions::{Completions, Printed};
use gpunvme_programs::sets::{Evict, Hydrate, Publish, Stage, Verify};
use gpunvme_programs::terminal::{complain, has_colours, print};
use ranks::Rank;
use reservation::Limit;
use selection::Selection;
use std::process::ExitCode;
use store::Store;

/// Parts in flight unless told. Those that go are shorter and more: a store may take each of them
/// slowly.
const HYDRATE_CONCURRENCY: usize = 16;
const PUBLISH_CONCURRENCY: usize = 48;

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

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(has_colours()).with_writer(std::io::stderr).init();
    match run(&args) {
        Ok(text) => match print(format_args!("{text}\n")) {
            Err(error) => {
                complain(format_args!("gpunvme: done, but the report could not be written: {error}"));
                ExitCode::FAILURE
            }
            Ok(()) => ExitCode::SUCCESS,
        },
        Err(error) => {
            complain(format_args!("gpunvme: {}", printable(&error)));
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
                selection: Selection { include: hydrate.include.clone(), share: hydrate.rank },
                concurrency: hydrate.limits.concurrency.map_or(HYDRATE_CONCURRENCY, usize::from),
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
                concurrency: publish.limits.concurrency.map_or(PUBLISH_CONCURRENCY, usize::from),
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
