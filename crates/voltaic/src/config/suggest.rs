//! "did you mean".

/// A longer word is like no name; comparing it takes time.
const MAX_WORD: usize = 256;

/// The candidate most like `word`, if one is like it at all.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > MAX_WORD {
        return None;
    }
    let folded = fold(word);
    candidates
        .into_iter()
        .map(|candidate| (score(&folded, &fold(candidate)), candidate))
        .filter(|(score, _)| *score > 0.6)
        // On equal scores the first candidate wins: `max_by` alone would take the last.
        .fold(None, |best: Option<(f64, &str)>, next| match best {
            Some(best) if best.0 >= next.0 => Some(best),
            _ => Some(next),
        })
        .map(|(_, candidate)| candidate)
}

/// Case and the kind of dash are not a reason to miss a name.
fn fold(word: &str) -> String {
    word.to_lowercase().replace('-', "_")
}

fn score(word: &str, candidate: &str) -> f64 {
    if word == candidate {
        return 1.0;
    }
    let whole = word.split('_').count() < candidate.split('_').count()
        && word.split('_').all(|part| candidate.split('_').any(|other| other == part));
    // `epochs` for `max_epochs`: few letters in common, but each part of the name is there.
    let similarity = strsim::normalized_damerau_levenshtein(word, candidate);
    if whole { similarity.max(0.75) } else { similarity }
}
