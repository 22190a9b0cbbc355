//! The bubble rates that Qi et al. 2023 (arXiv 2401.10241) print in table 6, from the times in table 5.

use super::super::*;

struct Row {
    stages: u32,
    microbatches: u32,
    costs: Costs,
    /// Bytes of a layer's activations for a sample: M_B.
    bytes: u64,
    /// Of 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p.
    bubbles: [f64; 5],
}

fn rows() -> Vec<Row> {
    let table = include_str!("../../../../tests/anchors/zb_table5_6.csv");
    let rows = table.lines().filter(|l| !l.starts_with('#')).skip(1);
    let row = |line: &str| {
        let cells: Vec<f64> = line.split(',').map(|c| c.parse().expect("a number")).collect();
        let [heads, hidden, sequence, stages, microbatches, forward, input, weight, transfer, ref bubbles @ ..] = cells[..]
        else {
            panic!("{line}")
        };
        let bytes = (sequence * (34.0 * hidden + 5.0 * heads * sequence)) as u64;
        let part = PartCost {
            forward,
            backward_input: input,
            backward_weight: weight,
            activation_bytes: bytes,
            weight_bytes: (32.0 * sequence * hidden) as u64,
        };
        let costs = Costs::even(stages as u32, part, transfer);
        let bubbles = bubbles.try_into().expect("five schedules");
        Row { stages: stages as u32, microbatches: microbatches as u32, costs, bytes, bubbles }
    };
    rows.map(row).collect()
}

impl Row {
    /// Whether `rule`'s bubble is `column`, as printed.
    fn has(&self, rule: Rule, column: usize, costs: &Costs) -> bool {
        let order = rule.order(self.stages, self.microbatches).expect("an order");
        let found = simulate(&order, costs).expect("it runs");
        format!("{:.4}", found.bubble) == format!("{:.4}", self.bubbles[column])
    }

    /// The bubble of what the search finds in the memory of `times` as many microbatches as there are stages.
    fn search(&self, times: u64) -> f64 {
        let limit_bytes = vec![times * u64::from(self.stages) * self.bytes; self.stages as usize];
        let (layout, microbatches) = (Layout::plain(self.stages), self.microbatches);
        let order = search(&Problem { layout, microbatches, costs: &self.costs, limit_bytes: &limit_bytes }).expect("an order");
        let found = simulate(&order, &self.costs).expect("it runs");
        assert!(found.peak_bytes.iter().zip(&limit_bytes).all(|(peak, limit)| peak <= limit));
        found.bubble
    }
}

const RULES: [Rule; 3] = [Rule::OneFOneB, Rule::ZbH1, Rule::ZbH2];

#[test]
fn all_rates_of_the_handmade_schedules() {
    let rows = rows();
    let count = |test: &dyn Fn(&Row, Rule, usize) -> bool| {
        let all = rows.iter().flat_map(|row| (0..3).map(move |column| (row, column)));
        all.filter(|&(row, column)| test(row, RULES[column], column)).count()
    };
    assert_eq!(count(&|row, rule, column| row.has(rule, column, &row.costs)), 36);
    // Controls: the neighbouring column, and sends that cost nothing.
    assert_eq!(count(&|row, rule, column| row.has(rule, (column + 1) % 3, &row.costs)), 0);
    let free = |row: &Row| Costs { transfers: vec![0.0; row.costs.transfers.len()], ..row.costs.clone() };
    assert_eq!(count(&|row, rule, column| row.has(rule, column, &free(row))), 0);
}

/// Half of the last printed digit.
const PRINTED: f64 = 0.5e-4;

#[test]
fn the_search_at_twice_the_memory() {
    for row in rows() {
        let (found, published) = (row.search(2), row.bubbles[4]);
        assert!(found <= published + PRINTED, "{} stages, {}: {found}, not {published}", row.stages, row.microbatches);
    }
}

#[test]
fn the_search_at_the_memory_of_1f1b() {
    for row in rows() {
        let (found, published) = (row.search(1), row.bubbles[3]);
        assert!(found <= published + PRINTED, "{} stages, {}: {found}, not {published}", row.stages, row.microbatches);
        // Control: it cannot be had for less memory.
        assert!(found > row.bubbles[4] + 10.0 * PRINTED);
    }
}
