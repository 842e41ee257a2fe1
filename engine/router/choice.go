package router

// Choice is the part of a Router that decides which instance gets a request, without its clock and
// its network: what a simulation drives. It is not safe for concurrent use.
type Choice struct{ table table }

// NewChoice makes the choice among instances that are numbered from 0, prefill instances first.
// All count as up.
func NewChoice(prefills, decodes int) *Choice {
	c := &Choice{}
	for range prefills {
		c.table.instances = append(c.table.instances, instance{role: prefill})
	}
	for range decodes {
		c.table.instances = append(c.table.instances, instance{role: decode})
	}
	return c
}

// Prefill picks a prefill instance that is not in tried, if there is one to be had.
func (c *Choice) Prefill(tried map[int]bool) (index int, ok bool) {
	return c.table.pick(prefill, tried)
}

// Decode picks a decode instance that is not in tried, if there is one to be had.
func (c *Choice) Decode(tried map[int]bool) (index int, ok bool) { return c.table.pick(decode, tried) }

// Failed takes note that an instance failed a request.
func (c *Choice) Failed(index int) { c.table.failed(index) }

// Probed takes the result of a health check: whether the instance answered that it is well, and if
// not, whether its address refused the connection, which is certain, or only kept silent.
func (c *Choice) Probed(index int, well, refusing bool) {
	switch {
	case well:
		c.table.probed(index, healthy)
	case refusing:
		c.table.probed(index, refused)
	default:
		c.table.probed(index, silent)
	}
}
