package testkit

import "github.com/kvport/kvport/connector"

// BlockTokens is the block size of Transfer and Query.
const BlockTokens = 16

// Blocks puts keys into neighbouring blocks.
func Blocks(keys []connector.BlockKey, first connector.BlockID) []connector.Block {
	out := make([]connector.Block, len(keys))
	for i, k := range keys {
		out[i] = connector.Block{Key: k, ID: first + connector.BlockID(i)}
	}
	return out
}

// Transfer moves the full blocks of a request.
func Transfer(id string, keys []connector.BlockKey, first connector.BlockID) connector.Transfer {
	return connector.Transfer{Request: connector.RequestID(id), Tokens: len(keys) * BlockTokens, Blocks: Blocks(keys, first)}
}

// Query asks about the prompt of a request: full blocks, and a token that is always computed.
func Query(id string, keys []connector.BlockKey) connector.Query {
	return connector.Query{Request: connector.RequestID(id), Tokens: len(keys)*BlockTokens + 1, Keys: keys}
}
