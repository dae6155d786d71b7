-- Queue or schedule a failed job again, as RQ does for one with retries left, if this execution still
-- holds it. RQ's own way writes the status before the rest: a kill in between loses the job.
-- when: as put_back takes it. counter: the field that counts tries, and `tries` its new value. ttl: seconds for
-- which results are kept, '' as long as they were. at_front: '1' where it goes to the front then, also later.
-- result: of the entry in rq:results, if there is one.
-- Returns as finish.lua does; such a job has not ended, so its dependents wait on.
local reply = not_held()
if reply then return reply end

write_run(args.counter, args.tries)
if args.at_front then call('HSET', job, 'enqueue_at_front_on_retry', 1) end
if #ARGV > 1 then
  add_result()
  expire_results(args.ttl)
end
put_back(args.when)
leave_slot(args.when)
count('failed_job_count')
let_go(queue, id, eid, worker)
return 'done'
