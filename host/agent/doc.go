// Package agent is a host as a process, for engines that are not written in Go.
//
// The processes of such an engine, its scheduler and one for each rank, connect over a unix socket and
// speak proto/kvport/v1/agent.proto. They come in any order. A rank hands over the memory of its paged
// cache as a descriptor; when all ranks are there the agent opens the connector behind them, and from
// then on it does for them what package host does for an engine in Go. No byte of a block passes
// through the socket. docs/agent.md says what an engine's side has to do; rule numbers such as
// AGENT-01 refer to docs/spec.
package agent
