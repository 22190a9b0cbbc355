//! The text of a graph: one node a line, exact in both directions.
