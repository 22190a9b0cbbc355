//! Speed of the library kernels: GF/s and GB/s on the shapes that decide whole steps. `cargo run --release --example bench [filter] [threads]`.

use dcc_kernels::Pool;
use dcc_kernels::library::matmul::{DotGeneral, Factor};
use std::time::Instant;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let filter = arguments.next().unwrap_or_default();
    let threads = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(1);
    let bench = Bench { filter, pool: Pool::new(threads), start: Instant::now() };
    bench.matmul();
}

struct Bench {
    filter: String,
    pool: Pool,
    start: Instant,
}

impl Bench {
    /// Prints the best of several runs as `work` per nanosecond.
    fn time(&self, name: &str, unit: &str, work: f64, mut body: impl FnMut(&Pool)) {
        if !name.contains(&self.filter) {
            return;
        }
        let start = Instant::now();
        let mut best = f64::INFINITY;
        let mut rounds = 0;
        while rounds < 5 || start.elapsed().as_millis() < 400 {
            let from = self.clock();
            body(&self.pool);
            best = best.min(self.clock() - from);
            rounds += 1;
        }
        println!("{name:44} {:10.2} us {:8.1} {unit}", best / 1e3, work / best);
    }

    /// Nanoseconds: of this thread's CPU where it works alone and the system says, so that a busy machine disturbs less; else of the wall.
    fn clock(&self) -> f64 {
        let cpu = || std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok();
        let wall = || self.start.elapsed().as_nanos() as f64;
        if self.pool.threads() == 1 { cpu().unwrap_or_else(wall) } else { wall() }
    }

    fn matmul(&self) {
        let shapes = [
            (512, 512, 512, "NN"),
            (1024, 768, 768, "NT"),
            (1024, 768, 768, "TN"),
            (1024, 3072, 768, "NN"),
            (1024, 768, 3072, "NT"),
            (64, 4096, 4096, "NT"),
            (64, 4096, 4096, "NN"),
            (256, 50257, 768, "NT"),
            (128, 10, 1024, "NT"),
            (128, 1024, 784, "NT"),
            (1024, 784, 128, "TN"),
            (1024, 256, 256, "NT"),
            (1024, 256, 256, "NN"),
            (256, 256, 1024, "TN"),
            (50257, 768, 256, "TN"),
        ];
        for (m, n, k, layout) in shapes {
            let (a_row, a_step) = if layout.starts_with('N') { (k, 1) } else { (1, m) };
            let (b_step, b_column) = if layout.ends_with('N') { (n, 1) } else { (1, k) };
            let factors = [
                Factor { size: m, lhs: Some(a_row), rhs: None, out: Some(n) },
                Factor { size: n, lhs: None, rhs: Some(b_column), out: Some(1) },
                Factor { size: k, lhs: Some(a_step), rhs: Some(b_step), out: None },
            ];
            let (a, b, mut c) = (vec![1.0f32; m * k], vec![0.5f32; k * n], vec![0f32; m * n]);
            let dot = DotGeneral::<f32>::new(&factors);
            self.time(&format!("matmul f32 {m}x{n}x{k} {layout}"), "GF/s", dot.flops() as f64, |pool| {
                dot.run(pool, 1.0, 0.0, &a, &b, &mut c)
            });
        }
    }
}
