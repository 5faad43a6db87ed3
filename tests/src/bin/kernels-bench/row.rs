//! Rows of tables.

use std::time::Duration;

/// A table's title and its columns.
pub fn head(title: &str, columns: &[&str]) {
    println!("\n{title}\n\n| {} |", columns.join(" | "));
    let rules: Vec<_> = columns.iter().enumerate().map(|(n, _)| if n == 0 { ":--" } else { "--:" }).collect();
    println!("| {} |", rules.join(" | "));
}

/// A row of a table.
pub fn row(name: &str, values: &[String]) {
    println!("| {name} | {} |", values.join(" | "));
}

/// Thousands a second.
pub fn thousands(count: u64, took: Duration) -> String {
    format!("{:.1}", count as f64 / took.as_secs_f64() / 1e3)
}

/// Milliseconds.
pub fn ms(took: Duration) -> String {
    format!("{:.2}", took.as_secs_f64() * 1e3)
}
