//! Pictures of a timeline: stages from top to bottom, time from left to right.

use super::order::Section;
use super::simulate::{Event, Timeline};
use crate::report::size;
use std::fmt::Write;

/// A line for each stage of `columns` characters: each pass begins with its name, or its letter if that does not fit, and goes on in
/// strokes; dots are waits. Then how long the stage computes of what the step takes, and its memory.
pub fn text(timeline: &Timeline, columns: usize) -> String {
    let length = timeline.length().max(f64::MIN_POSITIVE);
    let column = |time: f64| ((time / length * columns as f64).round() as usize).min(columns);
    let width = timeline.events.len().saturating_sub(1).to_string().len();
    let mut out = String::new();
    for (stage, events) in timeline.events.iter().enumerate() {
        let mut line = vec!['·'; columns];
        for event in events {
            let cells = &mut line[column(event.start)..column(event.end)];
            let mut name = event.pass.to_string();
            if name.len() > cells.len() {
                name.truncate(1);
            }
            let name = name.chars().chain(std::iter::repeat('-'));
            cells.iter_mut().zip(name).for_each(|(cell, c)| *cell = c);
        }
        let line: String = line.into_iter().collect();
        let _ = writeln!(out, "stage {stage:width$}  {line}  {}", summary(timeline, stage));
    }
    let _ = writeln!(out, "bubble {:.1} %", 100.0 * timeline.bubble);
    out
}

/// `80 % busy`, and the memory if it is known.
fn summary(timeline: &Timeline, stage: usize) -> String {
    let busy: f64 = timeline.events[stage].iter().map(|e| e.end - e.start).sum();
    let part = if timeline.cost > 0.0 { 100.0 * busy / timeline.cost } else { 0.0 };
    let peak = timeline.peak_bytes[stage];
    if peak == 0 { format!("{part:.0} % busy") } else { format!("{part:.0} % busy, {}", size(peak)) }
}

/// Pixels.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 170.0;
const WIDTH: f64 = 1200.0;
const TOP: f64 = 40.0;
const ROW: f64 = 28.0;
const BAR: f64 = 22.0;
/// Of a character of the names in the bars.
const CHARACTER: f64 = 6.5;

/// The same as an SVG file. `unit` is what the times are in, and `unit_length` how long it is in the timeline's: `("ms", 1e-3)`.
pub fn svg(timeline: &Timeline, unit: &str, unit_length: f64) -> String {
    let length = timeline.length().max(f64::MIN_POSITIVE);
    let height = TOP + ROW * timeline.events.len() as f64 + 34.0;
    let full = LEFT + WIDTH + RIGHT;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {full} {height}\" width=\"{full}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{full}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    legend(&mut out, timeline);
    axis(&mut out, length, height - 34.0, unit, unit_length);
    for (stage, events) in timeline.events.iter().enumerate() {
        let y = TOP + ROW * stage as f64;
        let middle = y + 15.5;
        let _ = writeln!(out, "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\">stage {stage}</text>", LEFT - 8.0);
        let _ = writeln!(out, "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{WIDTH}\" height=\"{BAR}\" fill=\"#eeeeee\"/>");
        for event in events {
            bar(&mut out, event, y, WIDTH / length, unit, unit_length);
        }
        let _ = writeln!(out, "<text x=\"{}\" y=\"{middle}\">{}</text>", LEFT + WIDTH + 8.0, summary(timeline, stage));
    }
    out + "</svg>\n"
}

fn color(section: Section) -> &'static str {
    match section {
        Section::Forward => "#4e79a7",
        Section::Backward | Section::BackwardInput => "#59a14f",
        Section::BackwardWeight => "#f28e2b",
    }
}

/// Chunks after the first are paler.
fn opacity(chunk: u32) -> f64 {
    (1.0 - 0.35 * f64::from(chunk)).max(0.3)
}

fn bar(out: &mut String, event: &Event, y: f64, scale: f64, unit: &str, unit_length: f64) {
    let (x, width) = (LEFT + event.start * scale, (event.end - event.start) * scale);
    let (name, pass) = (event.pass.to_string(), event.pass);
    let _ = write!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{}\" fill-opacity=\"{}\" stroke=\"white\" \
         stroke-width=\"0.5\"><title>{name}: {:.3} to {:.3} {unit}</title></rect>",
        color(pass.section),
        opacity(pass.chunk),
        event.start / unit_length,
        event.end / unit_length,
    );
    if width >= CHARACTER * name.len() as f64 + 2.0 {
        let (x, y) = (x + width / 2.0, y + 15.0);
        let _ =
            write!(out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\" font-size=\"10\" fill=\"white\">{name}</text>");
    }
    out.push('\n');
}

fn legend(out: &mut String, timeline: &Timeline) {
    let all = || timeline.events.iter().flatten().map(|e| e.pass);
    let names = [
        (Section::Forward, "forward"),
        (Section::Backward, "backward"),
        (Section::BackwardInput, "backward, input"),
        (Section::BackwardWeight, "backward, weights"),
    ];
    let mut x = LEFT;
    for (section, name) in names.into_iter().filter(|(section, _)| all().any(|p| p.section == *section)) {
        let _ = writeln!(out, "<rect x=\"{x}\" y=\"12\" width=\"14\" height=\"14\" fill=\"{}\"/>", color(section));
        let _ = writeln!(out, "<text x=\"{}\" y=\"23\">{name}</text>", x + 19.0);
        x += 19.0 + 8.0 * name.len() as f64 + 14.0;
    }
    let chunks = if all().any(|p| p.chunk > 0) { "later chunks paler; " } else { "" };
    let _ = writeln!(out, "<text x=\"{x}\" y=\"23\">{chunks}bubble {:.1} %</text>", 100.0 * timeline.bubble);
}

/// A mark at round times, five to ten in all.
fn axis(out: &mut String, length: f64, y: f64, unit: &str, unit_length: f64) {
    let total = length / unit_length;
    let power = 10f64.powf((total / 10.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|f| f * power).find(|step| total / step <= 10.0).unwrap_or(total);
    let digits = (-step.log10().floor()).max(0.0) as usize;
    for mark in 0..=(total / step) as usize {
        let time = mark as f64 * step;
        let x = LEFT + WIDTH * time / total;
        let _ = writeln!(out, "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#bbbbbb\"/>", y + 4.0);
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{time:.digits$} {unit}</text>", y + 18.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Costs, PartCost, Rule, simulate};
    use expect_test::expect;

    fn timeline(rule: Rule, stages: u32, microbatches: u32) -> Timeline {
        let part =
            PartCost { forward: 4.0, backward_input: 4.0, backward_weight: 4.0, activation_bytes: 8192, weight_bytes: 1024 };
        let order = rule.order(stages, microbatches).expect("an order");
        simulate(&order, &Costs::even(rule.layout(stages).parts(), part, 1.0)).expect("it runs")
    }

    #[test]
    fn as_text() {
        expect![[r#"
            stage 0  F0---F1--············B0-------F2---B1-------·······B2-------  69 % busy, 16.0 KiB
            stage 1  ······F0--B0--------F1--B1-------···F2--B2--------··········  69 % busy, 8.0 KiB
            bubble 30.8 %
        "#]]
        .assert_eq(&text(&timeline(Rule::OneFOneB, 2, 3), 60));
        expect![[r#"
            stage 0  F0--F1--F2--···f0-b0--w0--f1--b1--w1--F3--B0--W0--f2-b2--w2--··B1--W1--f3--b3--·B2--w3-··B3--W2--W3--···  92 % busy, 32.0 KiB
            stage 1  ·····F0--·f0--F1-·f1--·b0--w0--F2--B0--W0--f2--b1--w1-F3--B1--W1--f3--b2--·B2--·b3--·B3-w2--W2--w3--W3--  92 % busy, 32.0 KiB
            bubble 7.7 %
        "#]].assert_eq(&text(&timeline(Rule::ZbV, 2, 4), 104));
        // Too narrow for the names.
        expect![[r#"
            stage 0  FF··B0FB1·B2  69 % busy, 16.0 KiB
            stage 1  ·FB0FB1FB2··  69 % busy, 8.0 KiB
            bubble 30.8 %
        "#]]
        .assert_eq(&text(&timeline(Rule::OneFOneB, 2, 3), 12));
    }

    #[test]
    fn as_svg() {
        expect![[r##"
            <svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1440 130" width="1440" height="130" font-family="sans-serif" font-size="12">
            <rect width="1440" height="130" fill="white"/>
            <rect x="70" y="12" width="14" height="14" fill="#4e79a7"/>
            <text x="89" y="23">forward</text>
            <rect x="159" y="12" width="14" height="14" fill="#59a14f"/>
            <text x="178" y="23">backward, input</text>
            <rect x="312" y="12" width="14" height="14" fill="#f28e2b"/>
            <text x="331" y="23">backward, weights</text>
            <text x="481" y="23">bubble 20.0 %</text>
            <line x1="70.0" y1="40" x2="70.0" y2="100.0" stroke="#bbbbbb"/>
            <text x="70.0" y="114.0" text-anchor="middle">0 ms</text>
            <line x1="270.0" y1="40" x2="270.0" y2="100.0" stroke="#bbbbbb"/>
            <text x="270.0" y="114.0" text-anchor="middle">5 ms</text>
            <line x1="470.0" y1="40" x2="470.0" y2="100.0" stroke="#bbbbbb"/>
            <text x="470.0" y="114.0" text-anchor="middle">10 ms</text>
            <line x1="670.0" y1="40" x2="670.0" y2="100.0" stroke="#bbbbbb"/>
            <text x="670.0" y="114.0" text-anchor="middle">15 ms</text>
            <line x1="870.0" y1="40" x2="870.0" y2="100.0" stroke="#bbbbbb"/>
            <text x="870.0" y="114.0" text-anchor="middle">20 ms</text>
            <line x1="1070.0" y1="40" x2="1070.0" y2="100.0" stroke="#bbbbbb"/>
            <text x="1070.0" y="114.0" text-anchor="middle">25 ms</text>
            <line x1="1270.0" y1="40" x2="1270.0" y2="100.0" stroke="#bbbbbb"/>
            <text x="1270.0" y="114.0" text-anchor="middle">30 ms</text>
            <text x="62" y="55.5" text-anchor="end">stage 0</text>
            <rect x="70" y="40" width="1200" height="22" fill="#eeeeee"/>
            <rect x="70.0" y="40" width="160.0" height="22" fill="#4e79a7" fill-opacity="1" stroke="white" stroke-width="0.5"><title>F0: 0.000 to 4.000 ms</title></rect><text x="150.0" y="55" text-anchor="middle" font-size="10" fill="white">F0</text>
            <rect x="230.0" y="40" width="160.0" height="22" fill="#4e79a7" fill-opacity="1" stroke="white" stroke-width="0.5"><title>F1: 4.000 to 8.000 ms</title></rect><text x="310.0" y="55" text-anchor="middle" font-size="10" fill="white">F1</text>
            <rect x="630.0" y="40" width="160.0" height="22" fill="#59a14f" fill-opacity="1" stroke="white" stroke-width="0.5"><title>B0: 14.000 to 18.000 ms</title></rect><text x="710.0" y="55" text-anchor="middle" font-size="10" fill="white">B0</text>
            <rect x="790.0" y="40" width="160.0" height="22" fill="#f28e2b" fill-opacity="1" stroke="white" stroke-width="0.5"><title>W0: 18.000 to 22.000 ms</title></rect><text x="870.0" y="55" text-anchor="middle" font-size="10" fill="white">W0</text>
            <rect x="950.0" y="40" width="160.0" height="22" fill="#59a14f" fill-opacity="1" stroke="white" stroke-width="0.5"><title>B1: 22.000 to 26.000 ms</title></rect><text x="1030.0" y="55" text-anchor="middle" font-size="10" fill="white">B1</text>
            <rect x="1110.0" y="40" width="160.0" height="22" fill="#f28e2b" fill-opacity="1" stroke="white" stroke-width="0.5"><title>W1: 26.000 to 30.000 ms</title></rect><text x="1190.0" y="55" text-anchor="middle" font-size="10" fill="white">W1</text>
            <text x="1278" y="55.5">80 % busy, 16.0 KiB</text>
            <text x="62" y="83.5" text-anchor="end">stage 1</text>
            <rect x="70" y="68" width="1200" height="22" fill="#eeeeee"/>
            <rect x="270.0" y="68" width="160.0" height="22" fill="#4e79a7" fill-opacity="1" stroke="white" stroke-width="0.5"><title>F0: 5.000 to 9.000 ms</title></rect><text x="350.0" y="83" text-anchor="middle" font-size="10" fill="white">F0</text>
            <rect x="430.0" y="68" width="160.0" height="22" fill="#59a14f" fill-opacity="1" stroke="white" stroke-width="0.5"><title>B0: 9.000 to 13.000 ms</title></rect><text x="510.0" y="83" text-anchor="middle" font-size="10" fill="white">B0</text>
            <rect x="590.0" y="68" width="160.0" height="22" fill="#4e79a7" fill-opacity="1" stroke="white" stroke-width="0.5"><title>F1: 13.000 to 17.000 ms</title></rect><text x="670.0" y="83" text-anchor="middle" font-size="10" fill="white">F1</text>
            <rect x="750.0" y="68" width="160.0" height="22" fill="#59a14f" fill-opacity="1" stroke="white" stroke-width="0.5"><title>B1: 17.000 to 21.000 ms</title></rect><text x="830.0" y="83" text-anchor="middle" font-size="10" fill="white">B1</text>
            <rect x="910.0" y="68" width="160.0" height="22" fill="#f28e2b" fill-opacity="1" stroke="white" stroke-width="0.5"><title>W0: 21.000 to 25.000 ms</title></rect><text x="990.0" y="83" text-anchor="middle" font-size="10" fill="white">W0</text>
            <rect x="1070.0" y="68" width="160.0" height="22" fill="#f28e2b" fill-opacity="1" stroke="white" stroke-width="0.5"><title>W1: 25.000 to 29.000 ms</title></rect><text x="1150.0" y="83" text-anchor="middle" font-size="10" fill="white">W1</text>
            <text x="1278" y="83.5">80 % busy, 9.0 KiB</text>
            </svg>
        "##]].assert_eq(&svg(&timeline(Rule::ZbH1, 2, 2), "ms", 1.0));
    }
}
