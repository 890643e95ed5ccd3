//! Stream plans and their verification: the time per operation must not grow with the number of micro-batches.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use torchrelay_core::{Gpipe, Recompute, Schedule, StreamPlan, make_gpipe, plan_streams};

/// Partitions and micro-batches.
const SIZES: [(usize, usize); 5] = [(4, 8), (8, 64), (8, 4096), (32, 128), (64, 1024)];

fn schedule(n: usize, m: usize) -> Schedule {
    let options = Gpipe { recompute: Recompute::ExceptLast, ..Gpipe::default() };
    make_gpipe(n, m, options).unwrap_or_else(|error| unreachable!("{error}"))
}

fn plan(schedule: &Schedule, devices: &[Option<u32>]) -> StreamPlan {
    plan_streams(schedule, devices, &[]).unwrap_or_else(|error| unreachable!("{error}"))
}

fn all(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("streams");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2)).sample_size(10);
    for (n, m) in SIZES {
        let devices: Vec<_> = (0..).map(Some).take(n).collect();
        let schedule = schedule(n, m);
        let planned = plan(&schedule, &devices);
        group.throughput(Throughput::Elements(planned.operations().len() as u64));
        group.bench_function(BenchmarkId::new("plan", format!("{n}x{m}")), |bencher| {
            bencher.iter(|| plan(black_box(&schedule), &devices));
        });
        group.bench_function(BenchmarkId::new("verify", format!("{n}x{m}")), |bencher| {
            bencher.iter(|| black_box(&planned).verify());
        });
    }
    group.finish();
}

criterion_group!(benches, all);
criterion_main!(benches);
