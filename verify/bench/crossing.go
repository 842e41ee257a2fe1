package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/native/nixl"
)

// crossing is a connector that holds blocks, as a producer's plugin and as a consumer's: blocks move from the
// cache of one engine to that of another.
type crossing struct {
	from, to *link
	holder   connector.Holder
	order    [2][]int // of the blocks in either cache
}

// crossConfig is the config of the connector that holds blocks, as far as the benchmark needs it.
type crossConfig struct {
	LibDir string `json:"nixl_lib_dir,omitempty"`
	Mode   string `json:"mode"`
	UCXTCP string `json:"ucx_tcp,omitempty"`
}

// onTCP is the ucx_tcp of a benchmark whose bytes are to go over TCP, between processes of this machine.
const onTCP = "trusted-network"

func openCrossing(ctx context.Context, binary *host.Binary, config crossConfig, o linkOptions) (_ *crossing, err error) {
	o.binary, o.environment = binary.Path, binary.Manifest.Environment
	config.LibDir = os.Getenv(nixl.EnvDir)
	o.config = config
	c := &crossing{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	o.engine, o.role = "bench-p", connector.RoleProducer
	if c.from, err = openLink(ctx, o); err != nil {
		return nil, fmt.Errorf("producer: %w", err)
	}
	o.engine, o.role = "bench-d", connector.RoleConsumer
	if c.to, err = openLink(ctx, o); err != nil {
		return nil, fmt.Errorf("consumer: %w", err)
	}
	holder, ok := connector.As[connector.Holder](c.from.scheduler)
	if !ok {
		return nil, fmt.Errorf("%s holds no blocks", binary.Manifest.Name)
	}
	c.holder = holder
	c.order = scattered(c.from.blocks)
	for n := range c.steps() { // every page has been touched, and every block has its digests
		if err := c.from.save(ctx, c.transfer(0, n)); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// scattered is the order of blocks in two caches that have been in use for a while: next to none has its
// neighbour beside it.
func scattered(blocks int) [2][]int {
	rng := rand.New(rand.NewPCG(1, 2))
	return [2][]int{rng.Perm(blocks), rng.Perm(blocks)}
}

func (c *crossing) steps() int { return c.from.blocks / c.from.shape.batch }

// transfer is a step's blocks at one end: 0 the producer, 1 the consumer.
func (c *crossing) transfer(end, n int) *connector.Transfer {
	batch := c.from.shape.batch
	first := n % c.steps() * batch
	t := &connector.Transfer{Request: "bench", Tokens: batch * blockTokens}
	for i := range batch {
		t.Blocks = append(t.Blocks, connector.Block{ID: connector.BlockID(c.order[end][first+i]), Key: key(first + i)})
	}
	return t
}

// move is what a consumer waits for: a load by ticket, and the check of its digests. That the producer ends a
// request and gives a ticket is not part of it: the clock is paused meanwhile.
func (c *crossing) move(ctx context.Context, n int, clock *stopwatch) error {
	t := c.transfer(1, n)
	err := clock.pause(func() error {
		e := connector.Ended{Request: t.Request, Reason: connector.ReasonLength, Tokens: t.Tokens, Remote: true, Blocks: c.transfer(0, n).Blocks}
		holds, err := c.holder.Finish(ctx, []connector.Ended{e})
		if err != nil {
			return err
		}
		if holds[0].ID == 0 {
			return errors.New("the producer holds nothing")
		}
		t.Ticket = holds[0].Ticket
		return nil
	})
	if err != nil {
		return err
	}
	return c.to.load(ctx, t)
}

func (c *crossing) close() error {
	var errs []error
	for _, l := range []*link{c.to, c.from} {
		if l != nil {
			errs = append(errs, l.close())
		}
	}
	return errors.Join(errs...)
}

// stopwatch is a clock that can be stopped.
type stopwatch struct {
	begin  time.Time
	paused time.Duration
}

func (w *stopwatch) now() time.Duration { return time.Since(w.begin) - w.paused }

// pause runs what does not count.
func (w *stopwatch) pause(f func() error) error {
	at := time.Now()
	defer func() { w.paused += time.Since(at) }()
	return f()
}
