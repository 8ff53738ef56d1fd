//! Serves DNS over UDP and TCP (RFC 1035, RFC 7766) on a thread of its own.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::proto::op::ResponseCode;
use nebula_cert::listener::{Places, Source};
use nebula_config::log;
use nebula_linux::clock;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::Level;

use super::answer_limit::{AnswerLimit, Asker, Limit};
use super::message::{Answer, Query};
use crate::listener::until_stopped::{self, Running, Stopped};

/// Answers queries until it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    _running: Running,
}

/// What a server answers.
pub(super) trait Responder: Send + Sync + 'static {
    fn asker(&self, from: IpAddr) -> Asker;
    fn answer(&self, query: &Query, from: IpAddr) -> impl Future<Output = Answer> + Send;
}

/// The sockets of one address.
#[derive(Debug)]
pub(super) struct Sockets {
    udp: std::net::UdpSocket,
    /// `None` if another program has the port, which is left to it: names without TCP are better than no names.
    tcp: Option<std::net::TcpListener>,
}

impl Sockets {
    /// # Errors
    /// Returns the system's error if none of the addresses can be bound for UDP.
    pub(super) fn bind(addresses: &[SocketAddr]) -> io::Result<Self> {
        let udp = std::net::UdpSocket::bind(addresses)?;
        let address = udp.local_addr()?;
        let tcp = std::net::TcpListener::bind(address)
            .inspect_err(|error| tracing::warn!(%error, %address, "The DNS server answers by UDP only"));
        udp.set_nonblocking(true)?;
        let tcp = tcp.ok();
        tcp.as_ref().map(|tcp| tcp.set_nonblocking(true)).transpose()?;
        Ok(Self { udp, tcp })
    }

    /// Whether queries by TCP are answered, too.
    #[cfg(test)]
    pub(super) fn has_tcp(&self) -> bool {
        self.tcp.is_some()
    }

    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.udp.local_addr()
    }
}

impl Server {
    /// `before` and `after` run on the thread, before the first answer and after the last.
    ///
    /// # Errors
    /// Returns an error if no thread can be started.
    pub(super) fn start(
        sockets: Sockets,
        responder: impl Responder,
        before: impl FnOnce() + Send + 'static,
        after: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let running = until_stopped::spawn("dns", move |stopped| {
            before();
            if let Err(error) = runtime.block_on(serve(sockets, Arc::new(responder), stopped)) {
                tracing::error!(%error, "The DNS server ended");
            }
            after();
        })?;
        Ok(Self { _running: running })
    }
}

async fn serve(sockets: Sockets, responder: Arc<impl Responder>, stopped: Stopped) -> io::Result<()> {
    let udp = Arc::new(UdpSocket::from_std(sockets.udp)?);
    let tcp = sockets.tcp.map(TcpListener::from_std).transpose()?;
    let stopped = stopped.into_async()?;
    let (mut queries, mut connections) = (JoinSet::new(), JoinSet::new());
    let (places, mut limit) = (Places::new(MAX_CONNECTIONS), AnswerLimit::default());
    let mut datagram = [0; MAX_QUERY_BYTES];
    loop {
        tokio::select! {
            // Only the end of the other side makes it readable.
            _ = stopped.readable() => return Ok(()),
            Some(_) = queries.join_next() => {}
            Some(_) = connections.join_next() => {}
            received = udp.recv_from(&mut datagram) => match received {
                // One more is dropped, and its client asks again.
                Ok((length, from)) if queries.len() < MAX_QUERIES => {
                    let Some(query) = Query::parse(&datagram[..length]) else { continue };
                    let source = from.ip().to_canonical();
                    match limit.next(clock::now(), source, responder.asker(source), length) {
                        Limit::Bytes(most) => {
                            let most = most.min(query.max_datagram());
                            let (udp, responder) = (Arc::clone(&udp), Arc::clone(&responder));
                            queries.spawn(answer_datagram(udp, responder, query, from, most));
                        }
                        Limit::Truncated => {
                            tell_limited(source);
                            let reply = query.truncated(ResponseCode::NoError).unwrap_or_default();
                            let _ = udp.try_send_to(&reply, from);
                        }
                        Limit::Nothing => {}
                    }
                }
                Ok(_) => {}
                Err(_) => tokio::time::sleep(AFTER_ERROR).await,
            },
            accepted = accept(tcp.as_ref()) => match accepted {
                Ok((stream, local, from)) => {
                    let ended = Arc::new(Notify::new());
                    let end = Arc::clone(&ended);
                    if let Some(place) = places.admit(Source::of_tcp(local, from), move || end.notify_one()) {
                        let served = answer_stream(stream, Arc::clone(&responder), from.ip().to_canonical());
                        connections.spawn(async move {
                            tokio::select! {
                                () = served => {}
                                () = ended.notified() => {}
                            }
                            drop(place);
                        });
                    }
                    // Whoever has to end does so before the next one comes.
                    tokio::task::yield_now().await;
                }
                // Such as no more descriptors.
                Err(_) => tokio::time::sleep(AFTER_ERROR).await,
            },
        }
    }
}

/// The stream, and its addresses here and there. Waits for ever without a listener.
async fn accept(listener: Option<&TcpListener>) -> io::Result<(TcpStream, SocketAddr, SocketAddr)> {
    let Some(listener) = listener else { return std::future::pending().await };
    let (stream, from) = listener.accept().await?;
    let local = stream.local_addr()?;
    Ok((stream, local, from))
}

fn tell_limited(source: IpAddr) {
    const LIMITED: &str = "Asked for more names than are answered by datagram; it may ask by TCP";
    if log::admits(Level::WARN, LIMITED, &log::network_of(source).to_string()) {
        tracing::warn!(from = %source, "{LIMITED}");
    }
}

async fn answer_datagram(
    socket: Arc<UdpSocket>,
    responder: Arc<impl Responder>,
    query: Query,
    from: SocketAddr,
    max_bytes: usize,
) {
    let answer = responder.answer(&query, from.ip().to_canonical()).await;
    if let Some(reply) = query.reply(&answer, max_bytes) {
        // The client may be gone.
        let _ = socket.send_to(&reply, from).await;
    }
}

/// Answers one query after the other until the client closes, is idle, or sends what is no query.
async fn answer_stream(mut stream: TcpStream, responder: Arc<impl Responder>, from: IpAddr) {
    while let Ok(Ok(Some(query))) = timeout(IDLE, read_query(&mut stream)).await {
        let answer = responder.answer(&query, from).await;
        let Some(reply) = query.reply(&answer, usize::from(u16::MAX)) else { return };
        let Ok(length) = u16::try_from(reply.len()) else { return };
        let message = [&length.to_be_bytes(), &reply[..]].concat();
        if !matches!(timeout(IDLE, stream.write_all(&message)).await, Ok(Ok(()))) {
            return;
        }
    }
}

async fn read_query(stream: &mut TcpStream) -> io::Result<Option<Query>> {
    let length = usize::from(stream.read_u16().await?);
    let mut message = [0; MAX_QUERY_BYTES];
    let Some(message) = message.get_mut(..length) else { return Ok(None) };
    stream.read_exact(message).await?;
    Ok(Query::parse(message))
}

/// A query has one name of at most 255 bytes, and options.
const MAX_QUERY_BYTES: usize = 1500;
/// Queries by datagram that are answered at the same time.
const MAX_QUERIES: usize = 64;
/// Connections at the same time. Beyond this limit, clients of the source that has the most are disconnected.
const MAX_CONNECTIONS: usize = 16;
/// Longest wait for a client's next query (RFC 7766 section 6.2.3).
const IDLE: Duration = Duration::from_secs(10);
const AFTER_ERROR: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use hickory_resolver::proto::rr::RecordType;

    use super::super::message::tests::question;
    use super::*;

    /// Answers every query by TXT with the same text.
    struct Same(String);

    impl Responder for Same {
        fn asker(&self, from: IpAddr) -> Asker {
            if from == IpAddr::from([127, 0, 0, 66]) { Asker::Stranger } else { Asker::Local }
        }

        async fn answer(&self, _query: &Query, _from: IpAddr) -> Answer {
            Answer::text(&self.0, 1)
        }
    }

    /// A port that is free for UDP may be taken for TCP, by a connection of another test.
    fn start(text: &str) -> (Server, SocketAddr) {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let sockets = (0..100).map(|_| Sockets::bind(&any).unwrap()).find(|sockets| sockets.tcp.is_some()).unwrap();
        let address = sockets.address().unwrap();
        (Server::start(sockets, Same(text.to_owned()), || (), || ()).unwrap(), address)
    }

    fn framed(query: &[u8]) -> Vec<u8> {
        [&u16::try_from(query.len()).unwrap().to_be_bytes(), query].concat()
    }

    fn read_reply(stream: &mut std::net::TcpStream) -> Vec<u8> {
        let mut length = [0; 2];
        stream.read_exact(&mut length).unwrap();
        let mut reply = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut reply).unwrap();
        reply
    }

    #[test]
    fn what_does_not_fit_a_datagram_comes_by_tcp_query_after_query() {
        let (_server, address) = start(&"x".repeat(3000));
        let query = question("host", RecordType::TXT);
        let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        client.send_to(&query, address).unwrap();
        let mut reply = [0; 1500];
        let length = client.recv(&mut reply).unwrap();
        assert_eq!((reply[2] & 2, length), (2, query.len()), "truncated");
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        // Two queries at once are answered one after the other.
        stream.write_all(&[framed(&query), framed(&query)].concat()).unwrap();
        for _ in 0..2 {
            let reply = read_reply(&mut stream);
            assert_eq!((reply[2] & 2, reply[7]), (0, 1));
            assert!(reply.len() > 3000);
        }
    }

    #[test]
    fn a_stranger_gets_little_for_each_datagram_and_everything_by_tcp() {
        let (_server, address) = start(&"x".repeat(1000));
        let query = question("host", RecordType::TXT);
        let stranger = std::net::UdpSocket::bind("127.0.0.66:0").unwrap();
        stranger.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let mut reply = [0; 1500];
        // Four at a time, so that none is lost in a queue.
        for _ in 0..250 {
            (0..4).for_each(|_| assert!(stranger.send_to(&query, address).is_ok()));
            for _ in 0..4 {
                let length = stranger.recv(&mut reply).unwrap();
                assert_eq!((reply[2] & 2, length), (2, query.len()), "truncated");
            }
        }
        // Beyond its burst, half of them; on a slow machine the burst fills again meanwhile.
        let mut answered = (0..20).map(|_| {
            (0..40).for_each(|_| assert!(stranger.send_to(&query, address).is_ok()));
            (0..40).map_while(|_| stranger.recv(&mut reply).ok()).count()
        });
        assert!(answered.any(|count| count < 40), "no datagram goes without an answer");
        let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        client.send_to(&query, address).unwrap();
        assert!(client.recv(&mut reply).unwrap() > 1000, "others have what they ask for");
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.write_all(&framed(&query)).unwrap();
        assert!(read_reply(&mut stream).len() > 1000);
    }

    #[test]
    fn a_client_that_sends_no_query_is_cut_off_and_others_are_served() {
        let (_server, address) = start("x");
        for wrong in [vec![0xff, 0xff, 0], framed(b"no query")] {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            stream.write_all(&wrong).unwrap();
            assert_eq!(stream.read(&mut [0; 16]).unwrap_or(0), 0, "{wrong:?}");
        }
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.write_all(&framed(&question("host", RecordType::TXT))).unwrap();
        assert_eq!(read_reply(&mut stream)[7], 1);
    }

    #[test]
    fn connections_without_a_query_keep_nobody_from_the_answer() {
        let (_server, address) = start("x");
        // One that must give way at once may see that as an error.
        let silent: Vec<_> = (0..200).filter_map(|_| std::net::TcpStream::connect(address).ok()).collect();
        for _ in 0..10 {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            stream.write_all(&framed(&question("host", RecordType::TXT))).unwrap();
            assert_eq!(read_reply(&mut stream)[7], 1);
        }
        drop(silent);
    }

    #[test]
    fn the_port_of_another_program_is_left_to_it() {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let sockets = Sockets::bind(&[other.local_addr().unwrap()]).unwrap();
        assert!(sockets.tcp.is_none());
    }

    #[test]
    fn the_address_is_free_when_the_server_is_gone() {
        let (server, address) = start("x");
        drop(server);
        Sockets::bind(&[address]).unwrap();
    }
}
