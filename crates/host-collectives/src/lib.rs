//! Collectives of ranks on one host, through memory that all of them map.
