//! Hooks have the same names wherever they are listed.

use voltaic::module::{Hook, StepHook};

/// docs/hooks.md lists the hooks of the tables in `lightning/hooks.rs`, from which all else is made.
#[test]
fn the_page_has_all_hooks() {
    let hooks = Hook::ALL.iter().map(|hook| hook.name()).chain(StepHook::ALL.iter().map(|hook| hook.name()));
    let mut expected: Vec<&str> = hooks.collect();
    expected.sort_unstable();
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("../../docs/hooks.md")).unwrap();
    let table = page
        .lines()
        .skip_while(|line| *line != "## All hooks")
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .filter_map(|line| line.split('|').nth(1));
    let mut names: Vec<&str> = table
        .flat_map(|cell| cell.split('`'))
        .filter(|name| name.starts_with("on_") && name.bytes().all(|b| b == b'_' || b.is_ascii_lowercase()))
        .collect();
    names.sort_unstable();
    assert_eq!(names, expected);
}
