//! Composes the first document of a text into nodes: scalars as they were written, aliases not yet followed.

use std::borrow::Cow;
use std::collections::HashMap;

use serde_saphyr::granit_parser::{ErrorKind, Event, Options, Parser, ScalarStyle, ScanError, Tag};

/// The nodes of a document; an index into them stands for a node.
#[derive(Debug, Default)]
pub(crate) struct Document {
    nodes: Vec<Node>,
}

/// A value as it was written.
#[derive(Debug)]
pub(crate) struct Node {
    /// From 1.
    pub(crate) line: u64,
    pub(crate) kind: Kind,
}

#[derive(Debug)]
pub(crate) enum Kind {
    Scalar {
        text: String,
        is_plain: bool,
        /// In short form, such as `!!int`; `None` also for `!`.
        tag: Option<String>,
    },
    List(Vec<usize>),
    /// Keys and values in turn.
    Map(Vec<usize>),
    /// The node with the anchor, which is complete: no node contains itself.
    Alias(usize),
}

impl Document {
    /// Reads the first document; the rest of the text does not count. Without a document there are no nodes.
    ///
    /// # Errors
    /// Returns what is wrong with the text, and where.
    pub(crate) fn compose(text: &str) -> Result<Self, String> {
        let (mut text, mut work) = (Cow::Borrowed(text), MAX_WORK_FOR_REPAIRS);
        loop {
            let error = match Self::compose_strictly(&text) {
                Ok(document) => return Ok(document),
                Err(error) => error,
            };
            let error = match error {
                Failure::Limit(text) => return Err(text),
                Failure::Syntax(error) => error,
            };
            let left = work.checked_sub(text.len());
            let Some((repaired, left)) = left.and_then(|left| Some((repair(&text, &error)?, left))) else {
                return Err(error.to_string());
            };
            (text, work) = (Cow::Owned(repaired), left);
        }
    }

    pub(crate) fn root(&self) -> Option<usize> {
        (!self.nodes.is_empty()).then_some(0)
    }

    pub(crate) fn node(&self, index: usize) -> &Node {
        &self.nodes[index]
    }

    /// The node, or that which it is an alias of.
    pub(crate) fn followed(&self, index: usize) -> usize {
        match self.nodes[index].kind {
            Kind::Alias(target) => target,
            _ => index,
        }
    }

    fn compose_strictly(text: &str) -> Result<Self, Failure> {
        let mut options = Options::default();
        // Otherwise 33 comment lines where a value could follow are an error, and the published example has more.
        options.set_emit_comments(false);
        let mut document = Self::default();
        let mut anchors: HashMap<usize, usize> = HashMap::new();
        let mut open: Vec<usize> = Vec::new();
        for event in Parser::new_from_str_with_options(text, options) {
            let (event, span) = event.map_err(Failure::Syntax)?;
            let mut opens = false;
            let (kind, anchor) = match event {
                Event::DocumentEnd | Event::StreamEnd => break,
                Event::SequenceEnd | Event::MappingEnd => {
                    open.pop();
                    continue;
                }
                Event::Alias(anchor) => {
                    let target = anchors.get(&anchor).copied();
                    let unknown = || Failure::Limit("unknown anchor referenced".to_owned());
                    let target = target.ok_or_else(unknown)?;
                    if open.contains(&target) {
                        return Err(Failure::Limit("an anchor's value contains itself".to_owned()));
                    }
                    (Kind::Alias(target), 0)
                }
                Event::Scalar(text, style, anchor, tag) => {
                    let tag = tag.as_deref().and_then(short);
                    let is_plain = style == ScalarStyle::Plain;
                    (Kind::Scalar { text: text.into_owned(), is_plain, tag }, anchor)
                }
                // go-yaml ignores the tags of both.
                Event::SequenceStart(_, anchor, _) => {
                    opens = true;
                    (Kind::List(Vec::new()), anchor)
                }
                Event::MappingStart(_, anchor, _) => {
                    opens = true;
                    (Kind::Map(Vec::new()), anchor)
                }
                _ => continue,
            };
            let index = document.nodes.len();
            if index >= MAX_NODES {
                return Err(Failure::Limit(format!("more than {MAX_NODES} values")));
            }
            document.nodes.push(Node { line: span.start.line() as u64, kind });
            if let Some(Node { kind: Kind::List(items) | Kind::Map(items), .. }) =
                open.last().and_then(|parent| document.nodes.get_mut(*parent))
            {
                items.push(index);
            }
            if anchor != 0 {
                anchors.insert(anchor, index);
            }
            if opens {
                open.push(index);
            }
        }
        Ok(document)
    }
}

enum Failure {
    Syntax(ScanError),
    Limit(String),
}

/// The tag as go-yaml compares it. `!` says only that there is none.
fn short(tag: &Tag) -> Option<String> {
    let full = format!("{}{}", tag.handle(), tag.suffix());
    match full.strip_prefix("tag:yaml.org,2002:") {
        Some(name) => Some(format!("!!{name}")),
        None if full == "!" => None,
        None => Some(full),
    }
}

/// The text with blanks where the parser, which follows YAML 1.2, asks for them and go-yaml does not.
fn repair(text: &str, error: &ScanError) -> Option<String> {
    let line = error.marker().line().checked_sub(1)?;
    let start: usize = text.split_inclusive('\n').take(line).map(str::len).sum();
    let (before, rest) = text.split_at_checked(start)?;
    match error.kind() {
        ErrorKind::TabInIndentation => without_leading_tab(before, rest),
        // What comes before says where the line is: only brackets stay open at its end.
        ErrorKind::TabInBlockIndentation if is_in_brackets(before) => without_leading_tab(before, rest),
        // Blanks that a line of quoted text begins with are no part of it.
        ErrorKind::InvalidQuotedScalarIndent => Some(format!("{before}{:width$}{rest}", "", width = DEEPER_THAN_ANY)),
        ErrorKind::CommentNotSeparated => {
            let (at, _) = rest.char_indices().nth(error.marker().col()).filter(|(_, found)| *found == '#')?;
            Some(format!("{before}{} {}", &rest[..at], &rest[at..]))
        }
        _ => None,
    }
}

fn without_leading_tab(before: &str, rest: &str) -> Option<String> {
    let content = rest.trim_start_matches([' ', '\t']);
    let tabs = &rest[..rest.len() - content.len()];
    tabs.contains('\t').then(|| format!("{before}{}{content}", tabs.replace('\t', "        ")))
}

fn is_in_brackets(before: &str) -> bool {
    matches!(Document::compose_strictly(before), Err(Failure::Syntax(error))
        if matches!(error.kind(), ErrorKind::UnclosedFlowCollection { .. }))
}

/// Bytes read again because of repairs: each line that needs one is a reading.
const MAX_WORK_FOR_REPAIRS: usize = 8 << 20;

/// Values of one file, keys included.
const MAX_NODES: usize = 500_000;

/// Columns, more than the parser's limit of nesting could need.
const DEEPER_THAN_ANY: usize = 1024;
