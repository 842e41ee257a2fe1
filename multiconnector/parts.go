package multiconnector

import (
	"github.com/kvport/kvport/connector"
)

// ordinals numbers the blocks of a transfer within their groups, from the begin of the prompt: the
// blocks of each group end with the transfer's last token (rule GROUP-01).
func ordinals(t *connector.Transfer, groups []connector.Group) []int {
	count := make([]int, len(groups))
	for _, b := range t.Blocks {
		if int(b.Group) < len(count) {
			count[b.Group]++
		}
	}
	out := make([]int, len(t.Blocks))
	for i, b := range t.Blocks {
		if int(b.Group) >= len(count) {
			continue
		}
		n := groups[b.Group].BlockTokens
		out[i] = (t.From+t.Tokens+n-1)/n - count[b.Group]
		count[b.Group]--
	}
	return out
}

// ends gives the token after each block of a transfer, counted from the begin of the prompt.
func ends(t *connector.Transfer, groups []connector.Group) []int {
	out := ordinals(t, groups)
	for i, b := range t.Blocks {
		if int(b.Group) < len(groups) {
			out[i] = min((out[i]+1)*groups[b.Group].BlockTokens, t.From+t.Tokens)
		}
	}
	return out
}

// pick makes transfers of some blocks of t, given by index in order: t itself if it is all of them,
// else one for each run of adjacent blocks of a group.
func pick(t *connector.Transfer, indexes []int, groups []connector.Group) []connector.Transfer {
	if len(indexes) == len(t.Blocks) {
		return []connector.Transfer{*t}
	}
	ordinal, end := ordinals(t, groups), ends(t, groups)
	var out []connector.Transfer
	last := -1
	for _, i := range indexes {
		b := t.Blocks[i]
		if int(b.Group) >= len(groups) {
			continue
		}
		n := groups[b.Group].BlockTokens
		if last >= 0 && t.Blocks[last].Group == b.Group && ordinal[last]+1 == ordinal[i] {
			p := &out[len(out)-1]
			p.Blocks, p.Tokens = append(p.Blocks, b), end[i]-p.From
		} else {
			p := *t
			p.From = ordinal[i] * n
			p.Tokens, p.Blocks = end[i]-p.From, []connector.Block{b}
			out = append(out, p)
		}
		last = i
	}
	return out
}
