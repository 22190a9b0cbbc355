//! `dcc explain CODE`: the page of an error code.

use super::failure::Outcome;
use super::output;
use crate::error::{self, Code, Error};
use dcc_program::check::Fault;

#[derive(clap::Args)]
pub struct Args {
    /// Such as DCC0104; all codes with their titles where left out
    code: Option<String>,
}

/// Code, title and text of every page, the compiler's, the runtime's and the gate's, by code.
fn pages() -> Vec<(u16, &'static str, String)> {
    let compiler = error::PAGES.iter().map(|page| (page.code.0, page.title, page.text.to_owned()));
    let runtime = dcc_runtime::error::PAGES.iter().map(|&(code, title, text)| (code, title, text.to_owned()));
    let mut all: Vec<_> = compiler.chain(runtime).chain(Fault::pages()).collect();
    all.sort_unstable_by_key(|page| page.0);
    all
}

pub fn run(args: &Args) -> Outcome<i32> {
    let Some(code) = &args.code else {
        let lines = pages().into_iter().map(|(code, title, _)| format!("DCC{code:04}  {title}\n"));
        output::data(&lines.collect::<String>())?;
        return Ok(0);
    };
    let digits = code.to_ascii_uppercase();
    let number = digits.strip_prefix("DCC").unwrap_or(&digits).parse::<u16>().ok();
    let page = number.and_then(|number| pages().into_iter().find(|page| page.0 == number));
    let (code, title, text) =
        page.ok_or_else(|| Error::usage(format!("`{code}` is no error code of dcc")).help("`dcc explain` lists them"))?;
    let exit = format!("A command that ends with it has exit code {}.", Code(code).exit());
    output::data(&format!("DCC{code:04}: {title}\n\n{}\n{exit}\n", wrap(&text, 100)))?;
    Ok(0)
}

fn wrap(text: &str, width: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always a line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            *line += &format!(" {word}");
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// All codes that the sources of compiler and runtime can make: by the constructors of both error types, and in texts.
    fn made() -> BTreeSet<u16> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut folders = vec![root.join("src"), root.join("../runtime/src")];
        let mut codes = BTreeSet::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.extension() {
                    None if path.is_dir() => folders.push(path),
                    Some(extension) if extension == "rs" => codes.extend(codes_of(&std::fs::read_to_string(path).unwrap())),
                    _ => {}
                }
            }
        }
        codes.extend(Fault::pages().map(|page| page.0));
        codes
    }

    /// The numbers that follow a constructor in a source text, its tests left out.
    fn codes_of(source: &str) -> BTreeSet<u16> {
        let code = source.split("#[cfg(test)]").next().unwrap_or_default();
        let numbers = |call: &str| {
            let after = code.split(call).skip(1);
            after.filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()).collect::<Vec<u16>>()
        };
        ["Error::new(", "(report(", "error[DCC"].into_iter().flat_map(numbers).collect()
    }

    #[test]
    fn every_code_has_one_page() {
        let (made, all) = (made(), pages());
        assert!(made.len() > 50, "{made:?}");
        let codes: BTreeSet<u16> = all.iter().map(|page| page.0).collect();
        let missing: Vec<_> = made.difference(&codes).collect();
        assert!(missing.is_empty(), "codes without a page: {missing:?}");
        let unused: Vec<_> = codes.difference(&made).collect();
        assert!(unused.is_empty(), "pages of codes that nothing makes: {unused:?}");
        assert_eq!(codes.len(), all.len(), "a code has one page");
        for (code, title, text) in all {
            assert!(!title.is_empty() && text.len() > 120 && text.ends_with('.'), "DCC{code:04} says too little: {text}");
            assert!((1..=9).contains(&Code(code).exit()), "DCC{code:04}");
        }
    }

    #[test]
    fn text_wraps() {
        assert_eq!(wrap("a bc d", 4), "a bc\nd\n");
    }
}
