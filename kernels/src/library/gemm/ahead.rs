//! The memory that blocks ask for beside their own: what is read next.

use crate::library::lines::Lines;

/// Lines that should be on their way within so many blocks.
#[derive(Clone, Copy)]
pub(super) struct Due {
    lines: Lines,
    blocks: usize,
}

impl Due {
    pub fn within(blocks: usize, lines: Lines) -> Self {
        Due { lines, blocks }
    }

    pub fn none() -> Self {
        Due { lines: Lines::none(), blocks: 0 }
    }

    /// A block's share, as much as leaves all that follow the same.
    #[inline(always)]
    fn share(&self) -> usize {
        match self.lines.count() {
            0 => 0,
            count => count.div_ceil(self.blocks.max(1)),
        }
    }
}

/// What is read next, in the order in which it is asked for.
pub(super) struct Ahead {
    /// The column panel that follows.
    pub column: Due,
    /// The rows that follow.
    pub rows: Due,
    /// The columns that follow all these rows.
    pub columns: Due,
    /// What blocks should have asked for.
    owed: usize,
}

impl Ahead {
    pub fn none() -> Self {
        Ahead { column: Due::none(), rows: Due::none(), columns: Due::none(), owed: 0 }
    }

    /// What a block asks for, and how much of it. The columns are many, and would push out what is still read: they wait until a block's
    /// share would be more than `most`.
    #[inline(always)]
    pub fn due(&mut self, most: usize) -> (&mut Lines, usize) {
        let waits = self.columns.lines.count() < most * self.columns.blocks;
        self.owed += self.column.share() + self.rows.share() + if waits { 0 } else { self.columns.share() };
        for due in [&mut self.column, &mut self.rows, &mut self.columns] {
            due.blocks = due.blocks.saturating_sub(1);
        }
        let first =
            [&mut self.column, &mut self.rows].into_iter().find(|due| due.lines.count() > 0).unwrap_or(&mut self.columns);
        let count = self.owed.min(first.lines.count());
        self.owed -= count;
        (&mut first.lines, count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How much each of so many blocks asks for.
    fn counts(mut ahead: Ahead, blocks: usize, most: usize) -> Vec<usize> {
        let counts = (0..blocks).map(|_| {
            let (lines, count) = ahead.due(most);
            (0..count).for_each(|_| lines.ask());
            count
        });
        counts.collect()
    }

    fn lines(count: usize) -> Lines {
        Lines::new(std::ptr::null::<u8>(), count, 64, 64)
    }

    #[test]
    fn all_is_asked_for_in_time_and_evenly() {
        let rows = Ahead { rows: Due::within(4, lines(10)), ..Ahead::none() };
        assert_eq!(counts(rows, 4, 9), [3, 3, 2, 2]);
        let both = Ahead { rows: Due::within(2, lines(10)), columns: Due::within(4, lines(8)), ..Ahead::none() };
        let counts = counts(both, 4, 1);
        assert_eq!(counts.iter().sum::<usize>(), 18, "{counts:?}");
        assert!(counts.iter().all(|count| *count <= 7), "{counts:?}");
    }

    #[test]
    fn columns_wait() {
        let columns = Ahead { columns: Due::within(10, lines(12)), ..Ahead::none() };
        assert_eq!(counts(columns, 10, 4), [0, 0, 0, 0, 0, 0, 0, 4, 4, 4]);
    }
}
