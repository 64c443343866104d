//! A small XML tree, bounded in every direction.

use quick_xml::{
    Error as XmlError, XmlVersion,
    events::{BytesStart, Event},
    reader::Reader,
};

use super::{Fault, Format, ImportError, error::token};

/// One element with everything below it.
#[derive(Debug)]
pub(super) struct Element {
    pub(super) name: String,
    pub(super) line: usize,
    attributes: Vec<(String, String)>,
    pub(super) children: Vec<Element>,
    /// The text directly inside, without that of children; references are left as written.
    pub(super) text: String,
}

impl Element {
    /// The value of an attribute.
    pub(super) fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The children with this name.
    pub(super) fn children_named<'e>(&'e self, name: &'e str) -> impl Iterator<Item = &'e Self> {
        self.children.iter().filter(move |child| child.name == name)
    }
}

/// The name of the root element, if `text` gets as far as that.
pub(super) fn root_name(text: &str) -> Option<&str> {
    let mut reader = Reader::from_str(text);
    loop {
        let start = match reader.read_event().ok()? {
            Event::Start(_) | Event::Empty(_) => usize::try_from(reader.buffer_position()).ok()?,
            Event::Eof => return None,
            _ => continue,
        };
        // The name is taken from the text, where it lives longer than the event.
        let tag = text.get(..start)?.rsplit_once('<')?.1;
        return tag.split(|c: char| c.is_whitespace() || c == '>' || c == '/').next();
    }
}

/// Parses a document.
///
/// # Errors
///
/// If it is not well-formed, ends early, is nested too deeply, has too many parts, or declares entities.
pub(super) fn parse(text: &str, format: Format) -> Result<Element, ImportError> {
    Parser { text, format, open: Vec::new(), root: None, elements: 0, counted: (0, 1) }.run()
}

struct Parser<'a> {
    text: &'a str,
    format: Format,
    /// Elements whose end has not been seen, outermost first.
    open: Vec<Element>,
    root: Option<Element>,
    elements: usize,
    /// A byte position and the line it is in, to count lines only once.
    counted: (usize, usize),
}

impl Parser<'_> {
    fn run(mut self) -> Result<Element, ImportError> {
        let mut reader = Reader::from_str(self.text);
        loop {
            let start = reader.buffer_position();
            let event = match reader.read_event() {
                Ok(event) => event,
                Err(error) => return Err(self.reader_error(&error, reader.error_position())),
            };
            match event {
                Event::Start(tag) => self.open(&tag, start)?,
                Event::Empty(tag) => {
                    self.open(&tag, start)?;
                    self.close(start)?;
                }
                Event::End(_) => self.close(start)?,
                Event::Text(text) => self.push_text(&text),
                Event::CData(text) => self.push_text(&text),
                Event::GeneralRef(name) => self.push_text(&format!("&{};", &*name)),
                Event::DocType(declaration) if declaration.contains('[') => {
                    return Err(self.fault(Fault::Declarations, start));
                }
                Event::DocType(_) | Event::Decl(_) | Event::PI(_) | Event::Comment(_) => {}
                Event::Eof => break,
            }
        }
        if self.open.is_empty()
            && let Some(root) = self.root.take()
        {
            return Ok(root);
        }
        let end = self.text.len() as u64;
        let unclosed = self.unclosed("the document");
        Err(self.fault(Fault::EndsEarly { unclosed }, end))
    }

    fn open(&mut self, tag: &BytesStart<'_>, start: u64) -> Result<(), ImportError> {
        let line = self.line(start);
        self.elements += 1;
        if self.elements > MAX_ELEMENTS {
            return Err(self.too_many(line, "elements", MAX_ELEMENTS));
        }
        if self.open.len() == MAX_DEPTH {
            return Err(self.fault(Fault::TooDeep { limit: MAX_DEPTH }, start));
        }
        let mut attributes = Vec::new();
        for attribute in tag.attributes() {
            let attribute = attribute.map_err(|error| self.xml(&error, start))?;
            let value = attribute
                .normalized_value(XmlVersion::Explicit1_0)
                .map_err(|error| self.xml(&error, start))?;
            if attributes.len() == MAX_ATTRIBUTES {
                return Err(self.too_many(line, "attributes", MAX_ATTRIBUTES));
            }
            attributes.push((attribute.key.as_ref().to_owned(), value.into_owned()));
        }
        self.open.push(Element {
            name: tag.name().as_ref().to_owned(),
            line,
            attributes,
            children: Vec::new(),
            text: String::new(),
        });
        Ok(())
    }

    /// The reader has checked that there is an open element of the right name.
    fn close(&mut self, start: u64) -> Result<(), ImportError> {
        let Some(element) = self.open.pop() else {
            return Ok(());
        };
        match self.open.last_mut() {
            Some(parent) => parent.children.push(element),
            None if self.root.is_none() => self.root = Some(element),
            None => {
                let reason = format!("<{}> stands beside the root", token(&element.name));
                return Err(self.fault(Fault::Xml { reason }, start));
            }
        }
        Ok(())
    }

    fn push_text(&mut self, text: &str) {
        if let Some(element) = self.open.last_mut() {
            element.text.push_str(text);
        }
    }

    fn reader_error(&mut self, error: &XmlError, at: u64) -> ImportError {
        match error {
            // Syntax errors are what is still open when the input ends.
            XmlError::Syntax(_) => {
                let unclosed = self.unclosed("a tag or comment");
                self.fault(Fault::EndsEarly { unclosed }, at)
            }
            _ => self.xml(error, at),
        }
    }

    fn unclosed(&self, innermost: &str) -> String {
        let open = self.open.iter().rev().map(|element| format!("<{}>", token(&element.name)));
        let shown: Vec<String> = open.take(4).collect();
        if shown.is_empty() {
            innermost.to_owned()
        } else {
            format!("{innermost} inside {}", shown.join(" inside "))
        }
    }

    fn xml(&mut self, error: &impl ToString, at: u64) -> ImportError {
        let reason = token(&error.to_string());
        self.fault(Fault::Xml { reason }, at)
    }

    fn fault(&mut self, fault: Fault, at: u64) -> ImportError {
        let line = self.line(at);
        fault.at(self.format, line)
    }

    fn too_many(&self, line: usize, what: &'static str, limit: usize) -> ImportError {
        ImportError::TooMany { format: self.format, line, what, limit }
    }

    fn line(&mut self, at: u64) -> usize {
        let at = usize::try_from(at).map_or(self.text.len(), |at| at.min(self.text.len()));
        let (from, line) = match self.counted {
            (from, line) if from <= at => (from, line),
            _ => (0, 1),
        };
        let passed = &self.text.as_bytes()[from..at];
        let line = line + passed.iter().filter(|&&byte| byte == b'\n').count();
        self.counted = (at, line);
        line
    }
}

/// hwloc nests about twenty levels deep; recursion over the tree is safe to this depth.
const MAX_DEPTH: usize = 128;

/// A machine of 1,000 processors takes about 10,000; each costs some hundred bytes here.
const MAX_ELEMENTS: usize = 200_000;

const MAX_ATTRIBUTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn check_error(text: &str, expected: &str) {
        let error = parse(text, Format::NcclXml).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn a_tree_is_read_with_lines_and_text() {
        let root =
            parse("<?xml version='1.0'?>\n<a x='1 &lt; 2'>\n<b>t&amp;</b><b/></a>", Format::NcclXml).unwrap();
        assert_eq!((root.name.as_str(), root.line), ("a", 2));
        assert_eq!(root.attribute("x"), Some("1 < 2"));
        let texts: Vec<&str> = root.children_named("b").map(|b| b.text.as_str()).collect();
        assert_eq!(texts, ["t&amp;", ""]);
        assert_eq!(root.children[1].line, 3);
    }

    #[test]
    fn the_root_is_named_without_reading_the_rest() {
        assert_eq!(root_name("<!-- c --><system version='1'><"), Some("system"));
        assert_eq!(root_name("<topology/>"), Some("topology"));
        assert_eq!(root_name("<!-- c -->"), None);
        assert_eq!(root_name("<"), None);
    }

    #[test]
    fn documents_that_stop_early_are_named_with_their_line() {
        check_error(
            "<a>\n<b>\n<c x='",
            "line 3: the text ends early: a tag or comment inside <b> inside <a>",
        );
        check_error("<a>\n<b/>\n", "line 3: the text ends early: the document inside <a>");
        check_error("", "the document is not closed");
    }

    #[test]
    fn bombs_are_refused() {
        check_error("<!DOCTYPE a [<!ENTITY l 'ha'>]><a>&l;</a>", "declarations");
        check_error("<a x='&lol;'/>", "not well-formed");
        check_error(&"<a>".repeat(100_000), "nested deeper than 128");
        let many = format!("<a>{}</a>", "<b/>".repeat(MAX_ELEMENTS));
        check_error(&many, "more than 200000 elements");
        let attributes: String = (0..1_000).map(|n| format!(" a{n}=''")).collect();
        check_error(&format!("<a{attributes}/>"), "more than 64 attributes");
    }

    #[test]
    fn broken_markup_is_an_error() {
        check_error("<a></b>", "not well-formed");
        check_error("<a/><b/>", "beside the root");
        check_error("<a x='1' x='2'/>", "not well-formed");
    }
}
