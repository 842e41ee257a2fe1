package nixl_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"syscall"
	"time"

	"github.com/kvport/kvport/native/nixl"
)

// A process offers memory to a peer, which it meets over a channel of its own.
func Example_offer() {
	lib, err := nixl.Open("")
	if errors.Is(err, nixl.ErrUnavailable) {
		log.Fatal(err) // says what to do
	}
	agent, err := lib.NewAgent("prefill-0", nixl.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer agent.Close()
	ucx, err := agent.Backend("UCX", map[string]string{"ucx_error_handling_mode": "peer"})
	if err != nil {
		log.Fatal(err)
	}
	cache, err := syscall.Mmap(-1, 0, 64<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_SHARED)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := agent.Register(ucx, nixl.DRAM, nixl.Bytes(cache)); err != nil {
		log.Fatal(err)
	}
	metadata, err := agent.Metadata()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(metadata), nixl.Bytes(cache)) // to be sent to the peer
}

// The peer reads every second block of it, in place.
func ExampleAgent_Prepare() {
	var (
		agent    *nixl.Agent // with memory registered
		mine     nixl.Region // that memory
		metadata []byte      // of the peer's agent
		theirs   nixl.Region // of the peer
	)
	peer, err := agent.AddPeer(metadata)
	if err != nil {
		log.Fatal(err)
	}
	request := nixl.Request{Op: nixl.Read, Peer: peer, Notify: []byte("blocks 0, 2, 4 were read")}
	const block = 48 << 10
	for i := uint64(0); i < 6; i += 2 {
		from, err := theirs.Slice(i*block, block)
		if err != nil {
			log.Fatal(err)
		}
		to, err := mine.Slice(i*block, block)
		if err != nil {
			log.Fatal(err)
		}
		request.Local, request.Remote = append(request.Local, to), append(request.Remote, from)
	}
	transfer, err := agent.Prepare(request)
	if err != nil {
		log.Fatal(err)
	}
	defer transfer.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := transfer.Run(ctx); err != nil {
		log.Fatal(err) // nixl.ErrBackend: the peer may have gone
	}
}

// Somebody has to ask for notifications, which also lets peers connect and, over TCP, read and write.
func ExampleAgent_Notifications() {
	var agent *nixl.Agent
	for range time.Tick(100 * time.Microsecond) {
		messages, err := agent.Notifications()
		if errors.Is(err, nixl.ErrClosed) {
			return
		}
		if err != nil {
			log.Fatal(err)
		}
		for _, m := range messages {
			fmt.Printf("%s says %q\n", m.Peer, m.Message)
		}
	}
}
