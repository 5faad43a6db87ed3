//! Makes a sequence that disagrees as short as it gets.

use std::time::{Duration, Instant};

use super::call::Step;
use super::pair::Pair;
use super::run::{Disagreement, Runner};

/// How long it may take.
const LIMIT: Duration = Duration::from_secs(20);

/// How often a shorter sequence is tried where the disagreement does not come every time.
const TRIES: usize = 6;

/// A shorter sequence with a disagreement of the same kind.
pub fn shrink(runner: &Runner, pair: &mut Pair, steps: Vec<Step>, found: Disagreement) -> (Vec<Step>, Disagreement) {
    let mut steps = steps;
    let mut best = found;
    steps.truncate(best.step + 1);
    let remount = best.kind.contains("remount") || best.kind.starts_with("unmount");
    let kind = best.kind.clone();
    let fails = |pair: &mut Pair, steps: &[Step], tries: usize| {
        (0..tries).find_map(|_| runner.run(pair, steps, remount).err().filter(|found| found.kind == kind))
    };
    let tries = if fails(pair, &steps, 1).is_some() && fails(pair, &steps, 1).is_some() { 1 } else { TRIES };
    let end = Instant::now() + LIMIT;
    let mut chunk = steps.len().div_ceil(2);
    while chunk > 0 && Instant::now() < end {
        let mut shorter = false;
        let mut at = 0;
        while at < steps.len() && Instant::now() < end {
            let mut without = steps.clone();
            without.drain(at..(at + chunk).min(steps.len()));
            if let Some(found) = fails(pair, &without, tries) {
                without.truncate(found.step + 1);
                (steps, best, shorter) = (without, found, true);
            } else {
                at += chunk;
            }
        }
        if chunk > 1 {
            chunk = chunk.div_ceil(2);
        } else if !shorter {
            break;
        }
    }
    for at in 0..steps.len() {
        let plain: [fn(&mut Step); 2] = [|step| step.process = 0, |step| step.look = false];
        for change in plain {
            let mut simpler = steps.clone();
            simpler[at..=at].iter_mut().for_each(change);
            if simpler == steps || Instant::now() > end {
                continue;
            }
            if let Some(found) = fails(pair, &simpler, tries) {
                (steps, best) = (simpler, found);
            }
        }
    }
    (steps, best)
}
