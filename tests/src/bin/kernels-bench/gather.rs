//! Random gathers: rows of a table are added up by a kernel, and every sum is compared.

use gpunvme_tests::cuda::{Memory, Module, Reports, get, good, holding, word_at};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Rows, their sums, and what kernels put them to.
pub struct Gather<'a> {
    module: &'a Module,
    rows: Memory,
    out: Memory,
    expected: Vec<u32>,
    /// Words of a row.
    row: u32,
    blocks: u32,
}

impl<'a> Gather<'a> {
    /// So many random rows of `row` words of a file of `len` bytes, by so many blocks.
    pub fn new(module: &'a Module, len: u64, (count, row): (u64, u32), blocks: u32) -> Gather<'a> {
        let mut state = 88_172_645_463_325_252u64;
        let rows: Vec<u32> = (0..count)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state % (len / 4 / u64::from(row))) as u32
            })
            .collect();
        let sum = |number: &u32| {
            let from = u64::from(*number) * u64::from(row);
            (from..from + u64::from(row)).fold(0u32, |sum, n| sum.wrapping_add(word_at(n)))
        };
        let expected: Vec<u32> = rows.iter().map(sum).collect();
        let out = holding(module.gpu, &vec![0; rows.len() * 4]);
        Gather { module, rows: holding(module.gpu, rows.as_bytes()), out, expected, row, blocks }
    }

    /// How long the kernel of that name takes, whose first parameter is where words are.
    pub fn run(&self, name: &str, words: &[u8]) -> Duration {
        let reports = Reports::new(self.module.gpu, self.blocks);
        let (addresses, count) = ([self.rows.address(), self.out.address()], self.expected.len() as u64);
        let parameters = [words, addresses[0].as_bytes(), count.as_bytes(), self.row.as_bytes(), addresses[1].as_bytes()];
        let begun = Instant::now();
        reports.launch(self.module, name, 256, &parameters, &[]);
        self.module.wait();
        let took = begun.elapsed();
        good(&reports.get());
        assert!(get(self.module.gpu, &self.out, self.expected.len() * 4) == self.expected.as_bytes(), "{name}: other sums");
        took
    }
}
