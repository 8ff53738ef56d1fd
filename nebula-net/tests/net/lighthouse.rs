//! Nodes of this process that know each other by a lighthouse.

use nebula_net::Net;
use tokio::io::AsyncReadExt;
use tokio::io::AsyncWriteExt;

use crate::common::{hosts, overlay};
use crate::within;

/// The network of a tutorial: everything is on 127.0.0.1.
#[tokio::test]
async fn hosts_find_each_other_by_a_lighthouse_on_loopback() {
    let lighthouse = overlay(1).into();
    let [_lighthouse, near, far] = hosts().unwrap().map(|(socket, mut config)| {
        if config.identity.networks()[0].addr() == lighthouse {
            config.lighthouse.am_lighthouse = true;
            config.static_hosts.clear();
        } else {
            config.lighthouse.hosts = vec![lighthouse];
            config.static_hosts.retain(|host, _| *host == lighthouse);
        }
        Net::builder(config).socket(socket).start().unwrap()
    });
    within(far.up(lighthouse)).await.unwrap();
    let listener = far.listen(7).unwrap();
    let accepted = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"hello").await.unwrap();
    };
    let dialled = async {
        let mut stream = near.dial("10.42.0.3:7").await.unwrap();
        let mut got = [0; 5];
        stream.read_exact(&mut got).await.unwrap();
        got
    };
    let ((), got) = within(async { tokio::join!(accepted, dialled) }).await;
    assert_eq!(&got, b"hello");
}
