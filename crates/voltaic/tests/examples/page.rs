//! `docs/lightning_habana.md` lists all blocks of the original documents: the programs have what it says, and no more.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Blocks of code in each of the four documents.
const BLOCKS: [(&str, usize); 4] = [("000", 8), ("001", 25), ("002", 6), ("003", 2)];
/// Most lines that a block may take.
const LIMIT: usize = 60;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A row of the table of blocks.
struct Row {
    ids: Vec<String>,
    /// `program::function`s.
    here: Vec<String>,
    /// The function that the command runs.
    command: String,
    /// Lines there and here.
    lines: (usize, usize),
    is_there: bool,
}

/// `000-1`, and `000-1, 000-2`.
fn ids_of(text: &str) -> Vec<String> {
    let is_id = |word: &&str| {
        word.len() >= 5 && word.as_bytes()[3] == b'-' && word.bytes().all(|b| b.is_ascii_digit() || b == b'-')
    };
    text.split(|c: char| !c.is_ascii_digit() && c != '-').filter(is_id).map(str::to_owned).collect()
}

/// The words of the form `program::function` between backticks.
fn functions_of(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let is_name =
        |text: &str| text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    quoted
        .filter(|text| text.split_once("::").is_some_and(|(a, b)| is_name(a) && is_name(b)))
        .map(str::to_owned)
        .collect()
}

fn page() -> String {
    fs::read_to_string(root().join("docs/lightning_habana.md")).unwrap()
}

fn rows() -> Vec<Row> {
    let page = page();
    let cells = page.lines().filter_map(|line| {
        let cells: Vec<&str> = line.strip_prefix("| ")?.split(" | ").collect();
        (!ids_of(cells[0]).is_empty()).then_some(cells)
    });
    let row = |cells: Vec<&str>| {
        let number = |at: usize| {
            let part = cells[5].split('/').nth(at).unwrap_or_default();
            part.trim().parse().unwrap_or(0)
        };
        let is_there = !cells[3].contains("not yet");
        let command = cells[4].trim().trim_matches('`').replace(' ', "::");
        Row {
            ids: ids_of(cells[0]),
            here: functions_of(cells[3]),
            command,
            lines: (number(0), number(1)),
            is_there,
        }
    };
    cells.map(row).collect()
}

/// The programs, by name, with their text.
fn programs() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut programs: Vec<(String, String)> = entries
        .filter_map(|path| {
            let name = path.file_stem()?.to_str()?.to_owned();
            let file = if path.is_dir() { path.join("main.rs") } else { path };
            Some((name, fs::read_to_string(file).ok()?))
        })
        .collect();
    programs.sort();
    programs
}

/// An item of a program that belongs to blocks: their ids, its name, and how many lines it takes.
struct Item {
    ids: Vec<String>,
    name: String,
    lines: usize,
}

fn items(text: &str) -> Vec<Item> {
    let mut items = Vec::new();
    let mut ids = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(comment) = line.strip_prefix("///") {
            if comment.contains("Block") {
                ids.extend(ids_of(comment));
            }
            continue;
        }
        if ids.is_empty() || line.is_empty() {
            continue;
        }
        let mut body = vec![line];
        while !body
            .last()
            .is_some_and(|line| line.starts_with('}') || line.ends_with(";") && !line.starts_with(' '))
        {
            body.push(lines.next().unwrap_or_else(|| panic!("no end of {line}")));
        }
        let head = body.iter().find(|line| !line.starts_with('#')).unwrap_or(&line);
        let name = head.strip_prefix("fn ").and_then(|head| head.split('(').next()).unwrap_or(head);
        let is_code = |line: &&&str| !line.trim().is_empty() && !line.trim().starts_with("//");
        let code = body.iter().filter(is_code);
        items.push(Item { ids: std::mem::take(&mut ids), name: name.to_owned(), lines: code.count() });
    }
    items
}

/// The functions that `main` lists.
fn listed(text: &str) -> Vec<String> {
    let lists = text.split("blocks![").skip(1).filter_map(|rest| rest.split(']').next());
    lists
        .flat_map(|list| list.split(','))
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
        .collect()
}

#[test]
fn every_block_of_the_documents_stands_in_the_table_once_and_in_order() {
    let expected: Vec<String> = BLOCKS
        .iter()
        .flat_map(|(document, count)| (1..=*count).map(move |at| format!("{document}-{at}")))
        .collect();
    let found: Vec<String> = rows().into_iter().flat_map(|row| row.ids).collect();
    assert_eq!(found, expected);
}

#[test]
fn what_the_table_names_is_there_and_takes_the_lines_that_it_says() {
    let programs = programs();
    let mut problems = Vec::new();
    for row in rows() {
        let ids = row.ids.join(", ");
        let of_block: Vec<(&str, Item)> = programs
            .iter()
            .flat_map(|(program, text)| items(text).into_iter().map(move |item| (program.as_str(), item)))
            .filter(|(_, item)| item.ids.iter().any(|id| row.ids.contains(id)))
            .collect();
        if !row.is_there {
            if !row.here.is_empty() || !of_block.is_empty() {
                problems.push(format!("{ids} is `not yet`, and there is a program"));
            }
            continue;
        }
        for name in &row.here {
            let is_there =
                of_block.iter().any(|(program, item)| *name == format!("{program}::{}", item.name));
            if !is_there {
                problems.push(format!("{ids}: no program has {name} with this id in its comment"));
            }
        }
        let lines: usize = of_block.iter().map(|(_, item)| item.lines).sum();
        let runs = |(program, text): &(String, String)| {
            listed(text).iter().any(|function| row.command == format!("{program}::{function}"))
        };
        if !programs.iter().any(runs) {
            problems.push(format!("{ids}: no program runs {}", row.command));
        }
        if row.here.is_empty() || row.lines.0 == 0 {
            problems.push(format!("{ids}: a function here and the lines there must stand in the table"));
        }
        if row.lines.1 != lines || lines > LIMIT {
            problems.push(format!("{ids} takes {lines} lines here, not {}; at most {LIMIT}", row.lines.1));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn every_function_of_a_program_stands_on_the_page_and_the_other_way_round() {
    let there: BTreeSet<String> = functions_of(&page()).into_iter().collect();
    let mut here = BTreeSet::new();
    for (program, text) in programs() {
        here.extend(listed(&text).into_iter().map(|function| format!("{program}::{function}")));
    }
    let missing: Vec<&String> = here.difference(&there).collect();
    assert!(missing.is_empty(), "not on the page: {missing:?}");
    let known: BTreeSet<&str> = here.iter().filter_map(|name| name.split("::").next()).collect();
    let gone: Vec<&String> = there
        .difference(&here)
        .filter(|name| name.split("::").next().is_some_and(|program| known.contains(program)))
        .collect();
    assert!(gone.is_empty(), "no program has: {gone:?}");
}

/// The rows of a section's table, by cells.
fn table(section: &str) -> Vec<Vec<String>> {
    let page = page();
    let text = page.split(&format!("\n## {section}\n")).nth(1).unwrap();
    let text = text.split("\n## ").next().unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|'));
    rows.skip(2).map(|row| row.split('|').map(|cell| cell.trim().to_owned()).collect()).collect()
}

/// Whether a test of this name is in the sources: `it module::name`, `gaudi name`, or `doc file` for one in a comment.
fn is_a_test(name: &str) -> bool {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let Some((binary, path)) = name.split_once(' ') else { return false };
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    if binary == "doc" {
        return read(folder.join("src").join(path)).contains("/// ```compile_fail");
    }
    let (module, test) = path.split_once("::").unwrap_or(("main", path));
    let source = read(folder.join(format!("tests/{binary}/{module}.rs")));
    let is_row = |line: &str| line.trim_start().starts_with(&format!("{test}: "));
    let mut rows = source
        .split("\non_ranks_tests! {\n")
        .skip(1)
        .flat_map(|rows| rows.lines().take_while(|line| *line != "}"));
    source.contains(&format!("#[test]\nfn {test}() {{\n")) || rows.any(is_row)
}

#[test]
fn what_became_of_each_note_is_shown_by_a_test() {
    let rows = table("Notes and limitations");
    assert!(rows.len() > 40, "{}", rows.len());
    for row in rows {
        let [document, there, here, _, tests] = &row[..] else { panic!("{row:?}") };
        assert!(document.split(", ").all(|id| BLOCKS.iter().any(|(known, _)| *known == id)), "{row:?}");
        assert!(!there.is_empty(), "{row:?}");
        let is_here = ["same", "lifted", "differs", "refused"].contains(&here.as_str());
        assert!(is_here || ["not yet", "does not apply"].contains(&here.as_str()), "{row:?}");
        assert!(!is_here || !tests.is_empty(), "no test shows: {row:?}");
        for test in tests.split('`').skip(1).step_by(2) {
            assert!(is_a_test(test), "there is no test `{test}`");
        }
    }
    assert!(!is_a_test("it trainer::no_such_test") && !is_a_test("trainer"));
}

#[test]
fn programs_that_readme_names_are_there() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let table = readme.split("\n| feature | NAME |\n").nth(1).unwrap();
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let names: Vec<&str> =
        rows.flat_map(|row| row.rsplit(" | ").next().unwrap().split('`').skip(1).step_by(2)).collect();
    assert!(names.len() >= 11, "{names:?}");
    let programs = programs();
    for name in names {
        assert!(programs.iter().any(|(program, _)| program == name), "{name}");
    }
}

#[test]
fn every_program_stands_on_the_page() {
    let page = page();
    for (program, _) in programs().iter().filter(|(program, _)| program != "support") {
        assert!(
            page.contains(&format!("/examples/{program}")) || page.contains(&format!("`{program}::")),
            "{program}"
        );
    }
}

/// What GitHub makes of a heading, to link to it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase().replace(' ', "-");
    kept.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect()
}

fn anchors(page: &str) -> BTreeSet<String> {
    let outside_of_code = page.split("\n```").step_by(2);
    let lines = outside_of_code.flat_map(str::lines).filter(|line| line.starts_with('#'));
    lines.map(|line| anchor(line.trim_start_matches('#'))).collect()
}

/// It is the contents of the site of pages, too.
#[test]
fn the_table_of_pages_in_readme_has_all_of_them() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let docs = fs::read_dir(root().join("docs")).unwrap();
    let names = docs.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let pages = names.filter(|name| name.ends_with(".md"));
    let missing: Vec<String> = pages.filter(|name| !readme.contains(&format!("](docs/{name})"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn links_of_all_pages_lead_somewhere() {
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<PathBuf> =
        docs.filter(|path| path.extension().is_some_and(|end| end == "md")).collect();
    pages.extend(
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| root().join(name)),
    );
    assert!(pages.len() > 20, "{pages:?}");
    let mut problems = Vec::new();
    for path in &pages {
        let page = fs::read_to_string(path).unwrap();
        let targets = page.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.starts_with("http")) {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let there = if file.is_empty() { path.clone() } else { path.with_file_name("").join(file) };
            let is_page = there.extension().is_some_and(|end| end == "md");
            let has_heading = heading.is_empty() || !is_page || {
                fs::read_to_string(&there).is_ok_and(|page| anchors(&page).contains(heading))
            };
            if !there.exists() || !has_heading {
                problems.push(format!("{}: {target}", path.display()));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert_eq!(anchor(" `last` and `best`"), "last-and-best");
}
