//! One connection: bytes out, messages in.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::Shutdown;

use mio::net::TcpStream;

use crate::frame::{FrameError, FrameReader};

/// Bytes that wait for a reader at most; one who leaves more unread is given up.
const UNREAD: usize = 64 << 20;

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) stream: TcpStream,
    reader: FrameReader,
    out: Vec<u8>,
    sent: usize,
    is_closing: bool,
    is_shut: bool,
}

/// What came of reading.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    Open,
    Ended,
}

impl Link {
    pub(crate) fn new(stream: TcpStream) -> Self {
        // Messages are small and awaited. A socket that cannot be told so is only slower.
        let _slower = stream.set_nodelay(true);
        let reader = FrameReader::default();
        Self { stream, reader, out: Vec::new(), sent: 0, is_closing: false, is_shut: false }
    }

    pub(crate) fn has_unsent(&self) -> bool {
        self.sent < self.out.len()
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing
    }

    pub(crate) fn queue(&mut self, frame: &[u8]) {
        if self.is_closing {
            return;
        }
        // Before a slow reader it may never be empty, and what was sent would stay for ever.
        if self.sent > self.out.len() / 2 {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        self.out.extend_from_slice(frame);
    }

    /// Ends this direction once all is sent; the other side's end is waited for elsewhere.
    pub(crate) fn close(&mut self) {
        self.is_closing = true;
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while self.has_unsent() {
            match self.stream.write(&self.out[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.out.len() - self.sent > UNREAD {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        self.sent = 0;
        if self.is_closing && !self.is_shut {
            self.is_shut = true;
            // Not closed outright: what arrives later would be answered with a reset, which can overtake
            // the last message. One that the other side closed first is as good.
            let _gone = self.stream.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    /// Takes one piece of what has arrived; `None` when there is no more for now.
    pub(crate) fn fill(&mut self) -> io::Result<Option<Flow>> {
        let mut piece = [0; 16 << 10];
        loop {
            match self.stream.read(&mut piece) {
                Ok(0) => return Ok(Some(Flow::Ended)),
                Ok(count) => {
                    if !self.is_closing {
                        self.reader.push(&piece[..count]);
                    }
                    return Ok(Some(Flow::Open));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) fn next_frame(&mut self, limit_bytes: u32) -> Result<Option<&[u8]>, FrameError> {
        self.reader.next(limit_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_slow_reader_costs_only_what_it_has_not_read() {
        let piece = vec![7; 64 << 10];
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut link = Link::new(TcpStream::from_std(stream));
        let (mut reader, _) = listener.accept().unwrap();
        while link.out.len() - link.sent < 4 << 20 {
            link.queue(&piece);
            link.flush().unwrap();
        }
        // As much is read as is queued, so it is never empty and need never grow much.
        let mut read = vec![0; piece.len()];
        for _ in 0..400 {
            reader.read_exact(&mut read).unwrap();
            link.queue(&piece);
            link.flush().unwrap();
        }
        assert!(link.has_unsent());
        let (kept, unsent) = (link.out.len(), link.out.len() - link.sent);
        assert!(kept <= 2 * unsent + piece.len(), "{kept} bytes kept for {unsent}");
    }
}
