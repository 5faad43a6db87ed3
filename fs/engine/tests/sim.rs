//! The engine on our NVMe driver and the software controller, through cuts of its power: the cache
//! loses what was not flushed, and what was made durable is there.

use std::sync::Arc;

use gpunvme_blockdev::OpenMode;
use gpunvme_blockdev::sim::{Effect, Fault, On, SimController};
use gpunvme_engine::Filesystem;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;

use crate::common::{Pair, ROOT, Random, assert_sound, make, open};

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
/// The driver's options: nothing takes long, and if it does, the test would rather wait.
const DRIVER: &str = "completion=poll,depth=32";

fn controller(seed: u64, options: &str) -> Arc<SimController> {
    let device = format!("sim:engine,memory=64M,inline=on,seed={seed},{options}");
    let sim = SimController::new(&device, OpenMode::ReadWrite).expect("a controller");
    make(&sim.attach(DRIVER).expect("the driver comes up"));
    sim
}

fn mount(sim: &Arc<SimController>) -> Arc<Filesystem> {
    open(&sim.attach(DRIVER).expect("the driver comes up")).expect("the volume opens")
}

fn new_dir(fs: &Arc<Filesystem>, name: &[u8]) -> u64 {
    let new = NewNode { mode: 0o040755, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&WHO, ROOT, name, &new)).expect("created").ino
}

/// Cuts power, and mounts what is left.
fn cut(sim: &Arc<SimController>, fs: Arc<Filesystem>) -> Arc<Filesystem> {
    sim.power_cut();
    drop(fs);
    assert_eq!((sim.dma_faults(), sim.mapped()), (vec![], 0));
    sim.power_on();
    mount(sim)
}

#[test]
fn what_was_synced_survives_power_cuts_whatever_came_after() {
    for (seed, options) in [(1, "lba=512,mdts=5"), (2, "lba=4096,sgls=none"), (3, "lba=512,dbbuf=on,mdts=1"), (4, "vwc=off")] {
        let sim = controller(seed, options);
        let mut random = Random(seed);
        let mut fs = mount(&sim);
        let mut kept = Pair::below(fs.clone(), new_dir(&fs, b"kept"));
        for round in 0..4 {
            (0..60).for_each(|_| kept.step(&mut random));
            fs.flush_all().expect("nothing fails");
            fs.commit().expect("nothing fails");
            let mut other = Pair::below(fs.clone(), new_dir(&fs, format!("other{round}").as_bytes()));
            (0..random.below(100)).for_each(|_| other.step(&mut random));
            let model = kept.model.clone();
            drop((kept, other));
            fs = cut(&sim, fs);
            assert_sound(&fs, &format!("seed {seed}, round {round}"));
            kept = Pair { model, ..Pair::below(fs.clone(), ROOT) };
            kept.compare();
        }
    }
}

#[test]
fn power_cut_at_any_command_loses_nothing_that_was_fsynced() {
    for position in (0..160).step_by(7) {
        let sim = controller(position, if position % 2 == 0 { "lba=512" } else { "lba=4096,mdts=3" });
        let fs = mount(&sim);
        sim.inject(Fault::new(On::Io, Effect::PowerCut).after(position).once());
        let mut random = Random(position);
        let mut durable = Vec::new();
        let mut write = || -> Result<(), FsError> {
            for number in 0.. {
                let name = format!("file{number}").into_bytes();
                let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
                let ino = fs.wait(|| fs.create(&WHO, ROOT, &name, &new))?.ino;
                let len = 1 + random.below(100_000) as usize;
                let data = random.bytes(len);
                fs.wait(|| fs.write(ino, 0, &data, NOW))?;
                fs.sync_file(ino)?;
                durable.push((name, data));
            }
            Ok(())
        };
        write().expect_err("power goes in the end");
        let fs = cut(&sim, fs);
        assert_sound(&fs, &format!("cut at command {position}"));
        for (name, data) in durable {
            let ino = fs.wait(|| fs.lookup(ROOT, &name)).expect("it was fsynced").ino;
            assert!(fs.read(ino, 0, data.len() + 1).expect("it can be read") == data, "cut at command {position}");
        }
    }
}
