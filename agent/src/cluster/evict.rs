//! Which unprotected pods may be evicted.

use nebula_cni_contract::launch::Pod;

use super::pods::PodInfo;

/// Why a pod is not evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Spared {
    /// The API server knows no such pod on this node.
    #[error("the API server knows no such pod on this node")]
    Unknown,
    /// No controller would recreate it.
    #[error("it has no controller that would recreate it; delete it by hand")]
    Bare,
    /// The kubelet runs it from a file, so an eviction would only remove its picture in the API.
    #[error("it is a static pod; restart it by moving its manifest out of the kubelet's folder and back")]
    Static,
    /// It ends already.
    #[error("it is being deleted already")]
    Ending,
    /// Enough pods were evicted in the last minute.
    #[error("enough pods of this node were evicted in the last minute")]
    Later,
}

/// Judges the pod as the API server knows it.
///
/// # Errors
/// Returns the reason to spare it.
pub fn may_evict(pod: &Pod, info: Option<&PodInfo>) -> Result<(), Spared> {
    let info = info.ok_or(Spared::Unknown)?;
    if info.is_mirror {
        return Err(Spared::Static);
    }
    if info.uid != pod.uid {
        return Err(Spared::Unknown);
    }
    if info.is_ending {
        return Err(Spared::Ending);
    }
    if info.has_controller { Ok(()) } else { Err(Spared::Bare) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pod_that_comes_back_is_evicted() {
        let pod = Pod { namespace: "shop".into(), name: "web-0".into(), uid: "u1".into() };
        let good = PodInfo { uid: "u1".into(), has_controller: true, ..PodInfo::default() };
        assert_eq!(may_evict(&pod, Some(&good)), Ok(()));
        assert_eq!(may_evict(&pod, None), Err(Spared::Unknown));
        for (info, expected) in [
            (PodInfo { uid: "u2".into(), ..good.clone() }, Spared::Unknown),
            (PodInfo { has_controller: false, ..good.clone() }, Spared::Bare),
            (PodInfo { is_mirror: true, ..good.clone() }, Spared::Static),
            (PodInfo { is_ending: true, ..good.clone() }, Spared::Ending),
        ] {
            assert_eq!(may_evict(&pod, Some(&info)), Err(expected));
        }
    }
}
