//! Which ranks a node has to start.

/// The ranks that a node has to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// Ranks on this node.
    pub devices: usize,
    /// Nodes.
    pub num_nodes: usize,
    /// Number of this node.
    pub node_rank: usize,
    /// Host of node 0; known on all other nodes.
    pub master_addr: Option<String>,
    /// Port of the store; chosen by the system if there is one node.
    pub master_port: Option<u16>,
}
